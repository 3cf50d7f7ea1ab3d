/* The settings, the one lock and the time; and what happens at load and at a fork.
 *
 * Knows no memory, streams or tasks. */

#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "emulator.h"

Settings settings;
pthread_mutex_t the_lock = PTHREAD_MUTEX_INITIALIZER;
int forked;
static uint64_t random_state;

void lock(void) { pthread_mutex_lock(&the_lock); }
void unlock(void) { pthread_mutex_unlock(&the_lock); }

int set_by_name(const char *name, long long value)
{
#define SET(field, standard)                                                                                           \
    if (strcmp(name, #field) == 0) {                                                                                   \
        settings.field = value;                                                                                        \
        random_state = (uint64_t)settings.seed * 0x9E3779B97F4A7C15u + 1;                                              \
        return 0;                                                                                                      \
    }
    SETTINGS(SET)
#undef SET
    if (strcmp(name, "delay_us") != 0)
        return -1;
    settings.delay_us_min = settings.delay_us_max = value;
    return 0;
}

static void read_environment(void)
{
    char text[1024];
    const char *given = getenv("ACL_EMULATOR");
    if (given == NULL)
        return;
    if (strlen(given) >= sizeof text)
        violate("ACL_EMULATOR is longer than %zu bytes", sizeof text - 1);
    strncpy(text, given, sizeof text - 1);
    text[sizeof text - 1] = 0;
    char *rest = NULL;
    for (char *word = strtok_r(text, " ,", &rest); word != NULL; word = strtok_r(NULL, " ,", &rest)) {
        char *equals = strchr(word, '='), *end = NULL;
        long long value = 0;
        if (equals != NULL) {
            *equals = 0;
            value = strtoll(equals + 1, &end, 0);
        }
        if (equals == NULL || end == equals + 1 || *end != 0 || set_by_name(word, value) != 0)
            violate("ACL_EMULATOR: `%s` is no setting with a whole number", word);
    }
}

void settings_reset(void)
{
#define STANDARD(field, standard) settings.field = standard;
    SETTINGS(STANDARD)
#undef STANDARD
    set_by_name("seed", settings.seed);
    read_environment();
}

int64_t random_delay_ns(void)
{
    long long least = settings.delay_us_min, most = settings.delay_us_max;
    if (most <= least)
        return (least > 0 ? least : 0) * 1000;
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (least * 1000) + (int64_t)(random_state % (uint64_t)((most - least) * 1000));
}

int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

void condition_init(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

int wait_for(pthread_cond_t *condition, int64_t end_ns)
{
    if (end_ns < 0) {
        pthread_cond_wait(condition, &the_lock);
        return 0;
    }
    struct timespec end = {end_ns / 1000000000LL, end_ns % 1000000000LL};
    pthread_cond_timedwait(condition, &the_lock, &end);
    return now_ns() >= end_ns;
}

/* A child of fork gets the locks in a usable state, and may not use the library. */
static void before_fork(void)
{
    lock();
    if (in_flight > 0 && !forked)
        violate("fork() while %lld copies run", in_flight);
    ledger_hold();
}

static void after_fork(void)
{
    ledger_let_go();
    unlock();
}

static void in_child(void)
{
    forked = 1;
    after_fork();
}

__attribute__((constructor)) static void load(void)
{
    settings_reset();
    pthread_atfork(before_fork, after_fork, in_child);
}
