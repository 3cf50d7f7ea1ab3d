/* Lists of copies in one call, for the benchmark's limits. Knows nothing of what is copied.
 *
 * Built at run time for the very machine it runs on, so -march=native decides what is there.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* `to[i]`, `from[i]`: addresses; `nbytes[i]`: bytes. */
void copy_all(const uint64_t *to, const uint64_t *from, const uint64_t *nbytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        memcpy((void *)to[i], (const void *)from[i], nbytes[i]);
}

#if defined(__AVX512F__)
typedef __m512i word;
#define LOAD(at) _mm512_load_si512((const void *)(at))
#define STREAM(at, value) _mm512_stream_si512((void *)(at), value)
#elif defined(__AVX__)
typedef __m256i word;
#define LOAD(at) _mm256_load_si256((const __m256i *)(at))
#define STREAM(at, value) _mm256_stream_si256((__m256i *)(at), value)
#elif defined(__x86_64__)
typedef __m128i word;
#define LOAD(at) _mm_load_si128((const __m128i *)(at))
#define STREAM(at, value) _mm_stream_si128((__m128i *)(at), value)
#endif

/* The same with stores that bypass the caches. Addresses and lengths are multiples of 256 bytes here. */
void stream_all(const uint64_t *to, const uint64_t *from, const uint64_t *nbytes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        char *out = (char *)to[i];
        const char *in = (const char *)from[i], *end = in + nbytes[i];
#if defined(__x86_64__)
        enum { WORDS = 256 / sizeof(word) };
        for (; in < end; in += 256, out += 256) {
            word row[WORDS];
            for (int k = 0; k < WORDS; k++)
                row[k] = LOAD(in + k * sizeof(word));
            for (int k = 0; k < WORDS; k++)
                STREAM(out + k * sizeof(word), row[k]);
        }
#elif defined(__aarch64__)
        for (; in < end; in += 64, out += 64)
            __asm__ volatile("ldp q0, q1, [%1]\n\tldp q2, q3, [%1, #32]\n\t"
                             "stnp q0, q1, [%0]\n\tstnp q2, q3, [%0, #32]"
                             : : "r"(out), "r"(in) : "v0", "v1", "v2", "v3", "memory");
#else
        memcpy(out, in, (size_t)(end - in));
#endif
    }
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
