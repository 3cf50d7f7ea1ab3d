/* What the emulator's files share: the settings, the ledger, blocks of memory, contexts, streams and tasks.
 *
 * One lock guards all state. Bytes are moved, filled and summed without it; whatever a task touches stays mapped
 * until the task is over. */

#ifndef EMULATOR_H
#define EMULATOR_H

#include <pthread.h>

#include "acl.h"

#ifndef ACL_RELEASE
#define ACL_RELEASE 90 /* CANN 9.0 */
#endif

#define MAX_DEVICES 16
#define MAX_BATCH 4096 /* the largest group that published code is known to use */
#define POISON 0xDB    /* in a destination from the issue of its copy on */
#define GARBAGE 0x6B   /* what an async copy against the rules of 8.0 delivers */
#define FRESH 0xA5     /* in memory that was just allocated: it is not cleared */

/* Async copies of these releases need aclrtMallocHost memory and addresses that 64 divides. */
#define NEEDS_PINNED (ACL_RELEASE < 85)

/* --- settings.c: one row per setting, with its default; tests and ACL_EMULATOR name them --- */

#define SETTINGS(row)                                                                                                  \
    row(abort_on_violation, 1) /* print and abort(); 0: only remember */                                               \
    row(abort_works, 1)        /* 0: aclrtStreamAbort answers 207000 */                                                \
    row(bandwidth, 0)          /* bytes per second of each direction of each device; 0: as fast as memcpy */           \
    row(bare_context_code, RT_CONTEXT_NULL) /* of aclrtGetCurrentContext on a bare thread; 0: success and NULL */      \
    row(batch_supported, 1)    /* 0: batch copies answer 207000 */                                                     \
    row(call_us, 0)            /* what each call takes before it does anything, in microseconds */                     \
    row(checks, 1)             /* poison, checksums and comparisons; 0 for timing runs */                              \
    row(delay_us_max, 300)     /* each async task starts late, by at most this, */                                     \
    row(delay_us_min, 100)     /* and at least this, in microseconds */                                                \
    row(device_bytes, 32LL << 30) /* memory of each device */                                                          \
    row(devices, 2)            /* how many there are */                                                                \
    row(failed_queries, 0)     /* 1: aclrtStreamQuery answers what a task of the stream failed with, ever after */     \
    row(hang_early, 0)         /* 1: what hangs has copied nothing yet; 0: half of its bytes */                        \
    row(message_mode, 0)       /* 1: the recent message is the process's, not the thread's */                          \
    row(pinned_bytes, 32LL << 30) /* host memory that can be pinned */                                                 \
    row(pointer_attributes, 1) /* 0: aclrtPointerGetAttributes answers 207000 */                                       \
    row(query_works, 1)        /* 0: aclrtStreamQuery answers 207000 */                                                \
    row(seed, 1)               /* of the delays */

#define FIELD(name, value) long long name;
typedef struct {
    SETTINGS(FIELD)
} Settings;
#undef FIELD

extern Settings settings;

int set_by_name(const char *name, long long value); /* 0, or -1 for an unknown name */
void settings_reset(void);                          /* the defaults, then what ACL_EMULATOR says */
int64_t random_delay_ns(void);

/* --- ledger.c: calls, injected codes, violations, messages --- */

enum { NEEDS_NOTHING, NEEDS_INIT, NEEDS_CONTEXT };

/* Counts the call and answers 0 with the lock taken, or a code without it. `name` must be a literal. */
aclError enter(const char *name, int needs);
/* Gives the lock back; leaves a message for aclGetRecentErrMsg when the code is not 0. */
aclError leave(aclError code);
#define ENTER(needs)                                                                                                   \
    do {                                                                                                               \
        aclError refused = enter(__func__, needs);                                                                     \
        if (refused != ACL_SUCCESS)                                                                                    \
            return refused;                                                                                            \
    } while (0)

void violate(const char *format, ...) __attribute__((format(printf, 1, 2)));
aclError violated(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
aclError injected(const char *name); /* the code that this call must answer, or 0; counts nothing */
void inject(const char *name, aclError code, long long after, long long times);
void ledger_reset(void);
void ledger_hold(void); /* around a fork */
void ledger_let_go(void);
size_t violations_text(char *text, size_t room);
size_t calls_text(char *text, size_t room);
const char *recent_message(void);

/* --- settings.c again: the lock and the time --- */

extern pthread_mutex_t the_lock;
extern int forked; /* this process is a child that a user of the library forked */
void lock(void);
void unlock(void);
int64_t now_ns(void);
void condition_init(pthread_cond_t *condition);
/* Waits for a signal or the end (ns, monotonic; negative: no end). Answers whether the end has come. */
int wait_for(pthread_cond_t *condition, int64_t end_ns);

/* --- blocks.c: memory --- */

enum { DEVICE_BLOCK, PINNED_BLOCK, REGISTERED_BLOCK };

typedef struct Block {
    struct Block *next;
    int kind;
    int device;             /* of a device block */
    unsigned char *address; /* as handed out */
    unsigned char *shadow;  /* where the emulator reads and writes the bytes */
    size_t nbytes;          /* as asked for */
    size_t charged;         /* what it takes of the memory */
    void *mapping, *shadow_mapping;
    size_t mapped;
    int users; /* tasks in flight that touch it */
    int freed;  /* unmapped as soon as it has no users */
    int viewed; /* a test has its bytes in hand: they stay readable until the reset */
} Block;

typedef struct {
    long long blocks, bytes, charged;
} Usage;

extern Usage device_usage[MAX_DEVICES], pinned_usage;

Block *block_at(const void *address); /* the living block that holds this byte, or NULL */
void block_hold(Block *block);
void block_release(Block *block);
void blocks_reset(void);

/* --- contexts.c --- */

struct Stream;

typedef struct Context {
    struct Context *next;
    int device;
    int primary;
    int alive;
    int users;                /* aclrtSetDevice less aclrtResetDevice, of a primary one */
    struct Stream *by_default; /* the NULL stream, made on first use */
} Context;

extern int initialised; /* calls of aclInit since the last finalize */
extern int claimed;     /* somebody else in this process uses the library, and owns its life */

Context *current_context(void);
int peers(int device, int other);
aclError check_device(int device);

/* --- streams.c and engine.c --- */

typedef struct Item {
    unsigned char *to, *from;                  /* where the emulator finds the bytes */
    const unsigned char *to_known, *from_known; /* the same places as the caller knows them */
    Block *to_block, *from_block;              /* or NULL: the caller's own memory */
    size_t nbytes;
    uint64_t sum; /* of the source */
    int armed;    /* 1: the source is summed and the destination poisoned; -1: will be when the task begins */
    int garbage;
} Item;

enum { COPY, FILL, RECORD, AWAIT };

typedef struct Event Event;

typedef struct {
    const unsigned char *start, *end;
} Span;

typedef struct {
    Span *spans; /* in order, none touching another */
    size_t count;
} Reach;

typedef struct Task {
    struct Task *next;                   /* of the stream's queue */
    struct Task *later, *earlier;        /* of all in flight */
    struct Stream *stream;               /* NULL: a synchronous copy */
    const char *function;
    int what;
    int value;     /* of a FILL */
    Event *event;  /* of a RECORD or an AWAIT */
    uint64_t mark; /* which recording of the event */
    Item *items;
    size_t count;
    Item only;           /* the usual single item */
    Reach writes, reads; /* of all items; of checked tasks only */
    int device;
    int direction;   /* 0 to the device, 1 from it, 2 within */
    int checked;
    int hangs;
    aclError fails;
    int64_t issued_ns, delay_ns;
    int waited, over; /* somebody waits for this one task, and frees it */
    aclError outcome;
} Task;

typedef struct Stream {
    struct Stream *next;
    Context *context;
    pthread_t worker;
    pthread_cond_t changed;
    Task *first, *last, *running;
    uint64_t issued, finished;
    uint64_t aborts;
    int aborting, ending, alive;
    int hidden; /* a context's NULL stream */
    int ordered; /* waits for events: other streams' tasks may come before its own */
    int stops;   /* no task runs after one that failed */
    int64_t clock_ns;
    aclError error; /* of a task; the next synchronise tells */
    aclError failed; /* the same, until an abort */
} Stream;

/* streams.c */
extern Stream *all_streams;
extern int live_streams;

aclError find_stream(aclrtStream handle, Stream **stream); /* 0, 107003, or a violation */
void stream_end(Stream *stream, int force);                /* gives the lock away meanwhile */

/* flight.c: what is in flight, and what it must not meet */
extern long long in_flight;
Task *task_new(const char *function, int what, size_t count);
void task_free(Task *task);
void fly(Task *task);
void land(Task *task);
void arm(Task *task, Item *item);
void inspect(Task *task);
void transfer(Task *task, int half);
void check_races(Task *task);

/* engine.c */
aclError issue(Task *task, Stream *stream, int wait); /* takes the task over */
aclError perform_now(Task *task);                     /* a synchronous copy; takes the task over */
void *stream_work(void *stream);
void stream_abort(Stream *stream);
void hang_tasks(long long after, long long times);
void hang_sync(long long times);
void resume_all(void);
void engine_reset(void);

/* events.c */
struct Event {
    struct Event *next;
    uint64_t recorded, reached;
    int alive;
};
void event_reached(Event *event, uint64_t mark);

#endif
