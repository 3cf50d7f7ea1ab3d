/* What was called, what a test wants answered, what was done wrong, and the recent message of each thread.
 *
 * Has a lock of its own, so that anybody may report a violation at any time. */

#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "emulator.h"

#define MAX_FUNCTIONS 128
#define MAX_INJECTIONS 64
#define MAX_VIOLATIONS 64
#define MESSAGE_ROOM 4096

typedef struct {
    const char *name;
    long long calls;
    pid_t *threads; /* that called, each once */
    size_t thread_count;
} Calls;

typedef struct {
    char name[64];
    aclError code;
    long long after, times;
} Injection;

static pthread_mutex_t ledger_lock = PTHREAD_MUTEX_INITIALIZER;
static Calls calls[MAX_FUNCTIONS];
static int functions;
static Injection injections[MAX_INJECTIONS];
static int injected_rules;
static char violations[MAX_VIOLATIONS][512];
static int violation_count;

static char shared_message[MESSAGE_ROOM];
static __thread char own_message[MESSAGE_ROOM];
static __thread char given_message[MESSAGE_ROOM]; /* what aclGetRecentErrMsg answered last */
static __thread char detail[512];
static __thread const char *current; /* the function that this thread is in */

/* --- messages --- */

/* The newest stands on top. */
static void leave_message(aclError code)
{
    char older[MESSAGE_ROOM];
    char *message = settings.message_mode == 1 ? shared_message : own_message;
    pthread_mutex_lock(&ledger_lock);
    memcpy(older, message, MESSAGE_ROOM);
    const char *colon = detail[0] ? ": " : "";
    int head = snprintf(message, MESSAGE_ROOM, "EE9999: %s answers %d%s%s\n", current, code, colon, detail);
    strncpy(message + head, older, (size_t)(MESSAGE_ROOM - 1 - head));
    message[MESSAGE_ROOM - 1] = 0;
    pthread_mutex_unlock(&ledger_lock);
}

const char *recent_message(void)
{
    char *message = settings.message_mode == 1 ? shared_message : own_message;
    pthread_mutex_lock(&ledger_lock);
    memcpy(given_message, message, MESSAGE_ROOM);
    message[0] = 0;
    pthread_mutex_unlock(&ledger_lock);
    return given_message[0] ? given_message : NULL;
}

/* --- violations --- */

static void report(const char *format, va_list arguments)
{
    char text[448];
    vsnprintf(text, sizeof text, format, arguments);
    snprintf(detail, sizeof detail, "%s", text);
    pthread_mutex_lock(&ledger_lock);
    if (violation_count < MAX_VIOLATIONS)
        snprintf(violations[violation_count++], sizeof violations[0], "%s%s%s", current ? current : "",
                 current ? ": " : "", text);
    pthread_mutex_unlock(&ledger_lock);
    if (settings.abort_on_violation) {
        fprintf(stderr, "acl_emulator: violation: %s%s%s\n", current ? current : "", current ? ": " : "", text);
        abort();
    }
}

void violate(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    report(format, arguments);
    va_end(arguments);
}

aclError violated(aclError code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    report(format, arguments);
    va_end(arguments);
    return code;
}

/* --- injected codes --- */

void inject(const char *name, aclError code, long long after, long long times)
{
    pthread_mutex_lock(&ledger_lock);
    if (injected_rules < MAX_INJECTIONS) {
        Injection *rule = &injections[injected_rules++];
        snprintf(rule->name, sizeof rule->name, "%s", name);
        rule->code = code;
        rule->after = after;
        rule->times = times;
    }
    pthread_mutex_unlock(&ledger_lock);
}

/* Every rule of this name hears of the call; the first one that is due answers. */
aclError injected(const char *name)
{
    aclError code = ACL_SUCCESS;
    pthread_mutex_lock(&ledger_lock);
    for (int index = 0; index < injected_rules; index++) {
        Injection *rule = &injections[index];
        if (strcmp(rule->name, name) != 0)
            continue;
        if (rule->after > 0) {
            rule->after--;
        } else if (rule->times != 0 && code == ACL_SUCCESS) {
            rule->times -= rule->times > 0;
            code = rule->code;
        }
    }
    pthread_mutex_unlock(&ledger_lock);
    return code;
}

/* --- calls --- */

static void note_thread(Calls *function)
{
    pid_t own = gettid();
    for (size_t index = 0; index < function->thread_count; index++)
        if (function->threads[index] == own)
            return;
    pid_t *more = realloc(function->threads, (function->thread_count + 1) * sizeof *more);
    if (more == NULL)
        return;
    function->threads = more;
    function->threads[function->thread_count++] = own;
}

static void count(const char *name)
{
    int index = 0;
    pthread_mutex_lock(&ledger_lock);
    while (index < functions && calls[index].name != name)
        index++;
    if (index == functions && functions < MAX_FUNCTIONS)
        calls[functions++].name = name;
    if (index < functions) {
        calls[index].calls++;
        note_thread(&calls[index]);
    }
    pthread_mutex_unlock(&ledger_lock);
}

static void take_time(void)
{
    if (settings.call_us <= 0)
        return;
    struct timespec time = {settings.call_us / 1000000, settings.call_us % 1000000 * 1000};
    nanosleep(&time, NULL);
}

static aclError refuse(const char *why, aclError code)
{
    snprintf(detail, sizeof detail, "%s", why);
    return leave(code);
}

aclError enter(const char *name, int needs)
{
    current = name;
    detail[0] = 0;
    take_time();
    lock();
    count(name); /* with the lock: who sees the count and then takes the lock comes after the call, or while it waits */
    if (forked) {
        violate("called in a child of fork()");
        return refuse("called in a child of fork()", RT_DRV_INTERNAL_ERROR);
    }
    aclError code = injected(name);
    if (code != ACL_SUCCESS)
        return refuse("as the test asked", code);
    if (needs >= NEEDS_INIT && initialised == 0)
        return refuse("aclInit was not called", ACL_UNINITIALIZE);
    if (needs == NEEDS_CONTEXT && current_context() == NULL)
        return refuse("this thread has no context", RT_CONTEXT_NULL);
    return ACL_SUCCESS;
}

aclError leave(aclError code)
{
    unlock();
    if (code != ACL_SUCCESS)
        leave_message(code);
    current = NULL;
    return code;
}

void ledger_hold(void) { pthread_mutex_lock(&ledger_lock); }
void ledger_let_go(void) { pthread_mutex_unlock(&ledger_lock); }

void ledger_reset(void)
{
    pthread_mutex_lock(&ledger_lock);
    for (int index = 0; index < functions; index++)
        calls[index].calls = 0, calls[index].thread_count = 0;
    injected_rules = violation_count = 0;
    pthread_mutex_unlock(&ledger_lock);
}

/* --- answers: lines of text; each function answers the room that the whole needs, and fills what there is --- */

typedef struct {
    char *text;
    size_t room, used;
} Answer;

static void add_line(Answer *answer, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add_line(Answer *answer, const char *format, ...)
{
    char line[576];
    va_list arguments;
    va_start(arguments, format);
    size_t length = (size_t)vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    if (answer->used + length < answer->room)
        memcpy(answer->text + answer->used, line, length + 1);
    answer->used += length;
}

size_t violations_text(char *text, size_t room)
{
    Answer answer = {text, room, 0};
    pthread_mutex_lock(&ledger_lock);
    for (int index = 0; index < violation_count; index++)
        add_line(&answer, "%s\n", violations[index]);
    pthread_mutex_unlock(&ledger_lock);
    return answer.used + 1;
}

/* Each line: the function, how often it was called, and by which threads. */
size_t calls_text(char *text, size_t room)
{
    Answer answer = {text, room, 0};
    pthread_mutex_lock(&ledger_lock);
    for (int index = 0; index < functions; index++) {
        if (calls[index].calls == 0)
            continue;
        add_line(&answer, "%s %lld", calls[index].name, calls[index].calls);
        for (size_t thread = 0; thread < calls[index].thread_count; thread++)
            add_line(&answer, " %d", (int)calls[index].threads[thread]);
        add_line(&answer, "\n");
    }
    pthread_mutex_unlock(&ledger_lock);
    return answer.used + 1;
}
