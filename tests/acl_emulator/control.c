/* The test's side: settings, injections, hangs, counters, and the eye on device memory. No program calls these. */

#define _GNU_SOURCE
#include "emulator.h"

EXPORT int acl_emulator_configure(const char *name, long long value)
{
    lock();
    int failed = set_by_name(name, value);
    unlock();
    return failed;
}

EXPORT void acl_emulator_inject(const char *name, int code, long long after, long long times)
{
    inject(name, code, after, times);
}

EXPORT void acl_emulator_hang(long long after, long long times)
{
    lock();
    hang_tasks(after, times);
    unlock();
}

EXPORT void acl_emulator_hang_sync(long long times)
{
    lock();
    hang_sync(times);
    unlock();
}

EXPORT void acl_emulator_resume(void)
{
    lock();
    resume_all();
    unlock();
}

/* Text of lines; answers the room it needs, and is complete if `room` is that much. */
EXPORT size_t acl_emulator_violations(char *text, size_t room) { return violations_text(text, room); }
EXPORT size_t acl_emulator_calls(char *text, size_t room) { return calls_text(text, room); }

enum { LEFT = 6 };

EXPORT void acl_emulator_left(long long *numbers)
{
    lock();
    for (int index = 0; index < LEFT; index++)
        numbers[index] = 0;
    for (int device = 0; device < MAX_DEVICES; device++) {
        numbers[0] += device_usage[device].blocks;
        numbers[1] += device_usage[device].bytes;
    }
    numbers[2] = pinned_usage.blocks;
    numbers[3] = pinned_usage.bytes;
    numbers[4] = live_streams;
    numbers[5] = in_flight;
    unlock();
}

/* Where the emulator itself reaches these bytes, until the reset; NULL if they are not all in one block. */
EXPORT void *acl_emulator_memory(const void *address, size_t nbytes)
{
    lock();
    Block *block = block_at(address);
    size_t offset = block == NULL ? 0 : (size_t)((const unsigned char *)address - block->address);
    void *shadow = block == NULL || nbytes > block->nbytes - offset ? NULL : block->shadow + offset;
    if (shadow != NULL)
        block->viewed = 1;
    unlock();
    return shadow;
}

/* As if another library of this process had initialised it, and went on using it. */
EXPORT void acl_emulator_claim(void)
{
    lock();
    initialised++;
    claimed = 1;
    unlock();
}

EXPORT void acl_emulator_reset(void)
{
    lock();
    settings_reset();
    engine_reset();
    blocks_reset();
    claimed = 0;
    unlock();
    ledger_reset();
}
