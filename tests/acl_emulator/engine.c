/* The copy engines: one thread per stream performs its tasks one after another, late and at the wanted pace.
 *
 * It must not know what calls made the tasks. The pace is kept in planned times, so that a thread that wakes late
 * loses nothing. */

#define _GNU_SOURCE
#include <sys/prctl.h>

#include "emulator.h"

static struct {
    long long after, times;
} hanging;
static long long sync_hangs;
static uint64_t resumes;
static pthread_cond_t resumed = PTHREAD_COND_INITIALIZER;
static int64_t busy_until[MAX_DEVICES][3]; /* ns, by device and direction */

/* --- hangs --- */

void hang_tasks(long long after, long long times)
{
    hanging.after = after;
    hanging.times = times;
}

void hang_sync(long long times) { sync_hangs = times; }

/* Everything that hangs goes on, and nothing that waits will hang. */
void resume_all(void)
{
    hanging.times = sync_hangs = 0;
    resumes++;
    pthread_cond_broadcast(&resumed);
    for (Stream *stream = all_streams; stream != NULL; stream = stream->next) {
        if (stream->running != NULL)
            stream->running->hangs = 0;
        for (Task *task = stream->first; task != NULL; task = task->next)
            task->hangs = 0;
        pthread_cond_broadcast(&stream->changed);
    }
}

void engine_reset(void)
{
    resume_all();
    for (int device = 0; device < MAX_DEVICES; device++)
        for (int direction = 0; direction < 3; direction++)
            busy_until[device][direction] = 0;
}

static int hangs_now(void)
{
    if (hanging.times == 0)
        return 0;
    if (hanging.after > 0) {
        hanging.after--;
        return 0;
    }
    hanging.times -= hanging.times > 0;
    return 1;
}

/* --- time --- */

static size_t bytes_of(const Task *task)
{
    size_t nbytes = 0;
    for (size_t index = 0; index < task->count; index++)
        nbytes += task->items[index].nbytes;
    return nbytes;
}

/* When a task that is ready then will be over: copies of one direction of one device share its bandwidth. */
static int64_t reserve(const Task *task, int64_t ready_ns)
{
    if (settings.bandwidth <= 0 || task->what > FILL)
        return ready_ns;
    int64_t *busy = &busy_until[task->device][task->direction];
    int64_t start = ready_ns > *busy ? ready_ns : *busy;
    *busy = start + (int64_t)((double)bytes_of(task) * 1e9 / (double)settings.bandwidth);
    return *busy;
}

static void pause_until(Stream *stream, int64_t end_ns)
{
    while (!stream->aborting && now_ns() < end_ns)
        wait_for(&stream->changed, end_ns);
}

/* --- tasks --- */

static void arm_items(Task *task, int which)
{
    for (size_t index = 0; index < task->count; index++)
        if (task->items[index].armed == which)
            arm(task, &task->items[index]);
}

/* Answers how long it took, in ns: as long as the other half will, more or less. */
static int64_t move(Task *task, int half)
{
    unlock();
    if (half == 0)
        arm_items(task, -1);
    int64_t begin = now_ns();
    transfer(task, half);
    int64_t took = now_ns() - begin;
    lock();
    return took;
}

/* Not before the copy is over by its pace: until then nobody may touch what it uses. */
static void close_up(Task *task)
{
    unlock();
    inspect(task);
    lock();
}

static void take_stall(Stream *stream, Task *task)
{
    while (task->hangs && !stream->aborting)
        wait_for(&stream->changed, -1);
}

/* An abort stops a copy half way: half of its bytes have arrived. So does a failure. */
static aclError perform_copy(Stream *stream, Task *task)
{
    int hung = task->hangs;
    int64_t begin = task->issued_ns > stream->clock_ns ? task->issued_ns : stream->clock_ns;
    int64_t ready = begin + task->delay_ns;
    int64_t finish = reserve(task, ready);
    pause_until(stream, ready);
    if (settings.hang_early)
        take_stall(stream, task);
    int64_t took = move(task, 0);
    take_stall(stream, task);
    pause_until(stream, finish - took);
    if (stream->aborting)
        return RT_STREAM_ABORT;
    if (task->fails != ACL_SUCCESS)
        return task->fails;
    move(task, 1);
    pause_until(stream, finish);
    if (stream->aborting)
        return RT_STREAM_ABORT;
    close_up(task);
    stream->clock_ns = hung ? now_ns() : finish;
    return ACL_SUCCESS;
}

static aclError perform(Stream *stream, Task *task)
{
    if (stream->stops && stream->error != ACL_SUCCESS)
        return stream->error;
    if (task->what == RECORD)
        event_reached(task->event, task->mark);
    while (task->what == AWAIT && task->event->alive && task->event->reached < task->mark && !stream->aborting)
        wait_for(&stream->changed, -1);
    return task->what > FILL ? ACL_SUCCESS : perform_copy(stream, task);
}

static void retire(Stream *stream, Task *task, aclError code)
{
    land(task);
    stream->finished++;
    if (task->waited) {
        task->outcome = code;
        task->over = 1;
    } else {
        if (stream->error == ACL_SUCCESS && !stream->aborting)
            stream->error = stream->failed = code;
        task_free(task);
    }
    pthread_cond_broadcast(&stream->changed);
}

static Task *take(Stream *stream)
{
    Task *task = stream->first;
    stream->first = task->next;
    if (stream->first == NULL)
        stream->last = NULL;
    return task;
}

void *stream_work(void *argument)
{
    Stream *stream = argument;
    prctl(PR_SET_TIMERSLACK, 1); /* ns, to wake on time */
    lock();
    while (!stream->ending) {
        if (stream->first == NULL || stream->aborting) {
            wait_for(&stream->changed, -1);
            continue;
        }
        stream->running = take(stream);
        aclError code = perform(stream, stream->running);
        Task *task = stream->running;
        stream->running = NULL;
        retire(stream, task, code);
    }
    unlock();
    return NULL;
}

/* Stops the running task, drops the queued ones, and returns when the stream is idle. */
void stream_abort(Stream *stream)
{
    stream->aborts++;
    stream->aborting++;
    while (stream->first != NULL)
        retire(stream, take(stream), RT_STREAM_ABORT);
    pthread_cond_broadcast(&stream->changed);
    while (stream->running != NULL)
        wait_for(&stream->changed, -1);
    stream->aborting--;
    stream->error = stream->failed = ACL_SUCCESS;
    pthread_cond_broadcast(&stream->changed);
}

static void enqueue(Stream *stream, Task *task)
{
    if (stream->last != NULL)
        stream->last->next = task;
    else
        stream->first = task;
    stream->last = task;
    stream->issued++;
    pthread_cond_broadcast(&stream->changed);
}

static void launch(Task *task)
{
    check_races(task);
    fly(task);
    unlock();
    arm_items(task, 0);
    lock();
}

/* What is issued while the stream is being aborted is void. */
aclError issue(Task *task, Stream *stream, int wait)
{
    task->stream = stream;
    if (task->what <= FILL) {
        task->delay_ns = random_delay_ns();
        task->fails = injected("task");
        task->hangs = hangs_now();
    }
    uint64_t seen = resumes;
    launch(task);
    if (resumes != seen)
        task->hangs = 0;
    if (stream->aborting || !stream->alive) {
        land(task);
        task_free(task);
        return ACL_SUCCESS;
    }
    task->waited = wait;
    task->issued_ns = now_ns();
    enqueue(stream, task);
    if (!wait)
        return ACL_SUCCESS;
    while (!task->over)
        wait_for(&stream->changed, -1);
    aclError code = task->outcome;
    task_free(task);
    return code;
}

/* A copy that has happened when the call returns. Streams are not waited for. */
aclError perform_now(Task *task)
{
    uint64_t seen = resumes;
    launch(task);
    int64_t finish = reserve(task, now_ns());
    if (sync_hangs != 0) {
        sync_hangs -= sync_hangs > 0;
        while (resumes == seen)
            wait_for(&resumed, -1);
    }
    int64_t took = move(task, 0);
    while (settings.bandwidth > 0 && now_ns() < finish - took)
        wait_for(&resumed, finish - took);
    move(task, 1);
    while (settings.bandwidth > 0 && now_ns() < finish)
        wait_for(&resumed, finish);
    close_up(task);
    land(task);
    task_free(task);
    return ACL_SUCCESS;
}

__attribute__((constructor)) static void load(void) { condition_init(&resumed); }
