/* The calls on streams: making and ending them, waiting for them, aborting them, asking them.
 *
 * Streams that were destroyed stay known, so that their use is seen. It must not know how tasks are performed. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>

#include "emulator.h"

#define KNOWN_FLAGS 0x3Fu
#define WORKER_STACK (256u << 10)

Stream *all_streams;
int live_streams;

/* The worker takes no signals: they are the program's. */
static int start_worker(Stream *stream)
{
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, WORKER_STACK);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&stream->worker, &attributes, stream_work, stream);
    if (!failed)
        pthread_setname_np(stream->worker, stream->hidden ? "acl-default" : "acl-stream");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return failed;
}

static Stream *stream_new(Context *context, int hidden)
{
    Stream *stream = calloc(1, sizeof *stream);
    condition_init(&stream->changed);
    stream->context = context;
    stream->hidden = hidden;
    if (start_worker(stream) != 0) {
        free(stream);
        return NULL;
    }
    stream->alive = 1;
    live_streams += !hidden;
    stream->next = all_streams;
    all_streams = stream;
    return stream;
}

aclError find_stream(aclrtStream handle, Stream **found)
{
    Context *context = current_context();
    if (handle == NULL) {
        if (context->by_default == NULL)
            context->by_default = stream_new(context, 1);
        *found = context->by_default;
        return *found == NULL ? RT_NO_STREAM_RESOURCE : ACL_SUCCESS;
    }
    for (Stream *stream = all_streams; stream != NULL; stream = stream->next)
        if (stream == handle && stream->alive) {
            *found = stream;
            return stream->context == context ? ACL_SUCCESS : RT_STREAM_CONTEXT;
        }
    return violated(RT_INVALID_HANDLE, "%p is no living stream", handle);
}

void stream_end(Stream *stream, int force)
{
    if (force)
        stream_abort(stream);
    while (stream->finished < stream->issued)
        wait_for(&stream->changed, -1);
    if (!stream->alive)
        return;
    stream->alive = 0;
    stream->ending = 1;
    pthread_cond_broadcast(&stream->changed);
    unlock();
    pthread_join(stream->worker, NULL);
    lock();
    live_streams -= !stream->hidden;
    if (stream->context->by_default == stream)
        stream->context->by_default = NULL;
}

static aclError create(aclrtStream *handle)
{
    if (handle == NULL)
        return ACL_INVALID_PARAM;
    Stream *stream = stream_new(current_context(), 0);
    if (stream == NULL)
        return RT_NO_STREAM_RESOURCE;
    *handle = stream;
    return ACL_SUCCESS;
}

EXPORT aclError aclrtCreateStream(aclrtStream *handle)
{
    ENTER(NEEDS_CONTEXT);
    return leave(create(handle));
}

EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream *handle, uint32_t priority, uint32_t flag)
{
    ENTER(NEEDS_CONTEXT);
    (void)priority;
    return leave(flag & ~KNOWN_FLAGS ? RT_PARAM_INVALID : create(handle));
}

static aclError destroy(aclrtStream handle, int force)
{
    Stream *stream = NULL;
    if (handle == NULL)
        return ACL_INVALID_PARAM;
    aclError code = find_stream(handle, &stream);
    if (code != ACL_SUCCESS)
        return code;
    if (stream->hidden)
        return violated(RT_PARAM_INVALID, "the default stream is not the caller's");
    int busy = stream->finished < stream->issued;
    if (!force && busy)
        violate("stream %p is destroyed with %llu tasks unfinished", handle,
                (unsigned long long)(stream->issued - stream->finished));
    stream_end(stream, force || busy);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtDestroyStream(aclrtStream handle)
{
    ENTER(NEEDS_CONTEXT);
    return leave(destroy(handle, 0));
}

EXPORT aclError aclrtDestroyStreamForce(aclrtStream handle)
{
    ENTER(NEEDS_CONTEXT);
    return leave(destroy(handle, 1));
}

EXPORT aclError aclrtCtxGetCurrentDefaultStream(aclrtStream *handle)
{
    ENTER(NEEDS_CONTEXT);
    Stream *stream = NULL;
    aclError code = handle == NULL ? ACL_INVALID_PARAM : find_stream(NULL, &stream);
    if (code == ACL_SUCCESS)
        *handle = stream;
    return leave(code);
}

EXPORT aclError aclrtSetStreamFailureMode(aclrtStream handle, uint64_t mode)
{
    ENTER(NEEDS_CONTEXT);
    Stream *stream = NULL;
    aclError code = handle == NULL || mode > 1 ? RT_PARAM_INVALID : find_stream(handle, &stream);
    if (code == ACL_SUCCESS)
        stream->stops = (int)mode;
    return leave(code);
}

/* --- waiting --- */

/* For what is issued by now. The error of a task is told once. */
static aclError wait_idle(Stream *stream, int64_t end_ns)
{
    uint64_t target = stream->issued, aborts = stream->aborts;
    int late = 0;
    while (stream->finished < target && stream->aborts == aborts && !late)
        late = wait_for(&stream->changed, end_ns);
    if (stream->aborts != aborts)
        return RT_STREAM_ABORT;
    if (stream->finished < target)
        return RT_STREAM_SYNC_TIMEOUT;
    aclError code = stream->error;
    stream->error = ACL_SUCCESS;
    return code;
}

static aclError end_of(int32_t timeout_ms, int64_t *end_ns)
{
    if (timeout_ms == 0)
        return violated(RT_PARAM_INVALID, "a timeout of 0 is not documented");
    if (timeout_ms < -1)
        return violated(RT_PARAM_INVALID, "a timeout of %d is not documented", timeout_ms);
    *end_ns = timeout_ms == -1 ? -1 : now_ns() + timeout_ms * 1000000LL;
    return ACL_SUCCESS;
}

static aclError synchronize(aclrtStream handle, int32_t timeout_ms)
{
    Stream *stream = NULL;
    int64_t end_ns = -1;
    aclError code = end_of(timeout_ms, &end_ns);
    if (code == ACL_SUCCESS)
        code = find_stream(handle, &stream);
    return code == ACL_SUCCESS ? wait_idle(stream, end_ns) : code;
}

EXPORT aclError aclrtSynchronizeStream(aclrtStream handle)
{
    ENTER(NEEDS_CONTEXT);
    return leave(synchronize(handle, -1));
}

EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms)
{
    ENTER(NEEDS_CONTEXT);
    return leave(synchronize(handle, timeout_ms));
}

static aclError synchronize_device(int32_t timeout_ms)
{
    int64_t end_ns = -1;
    int device = current_context()->device;
    aclError first = end_of(timeout_ms, &end_ns);
    if (first != ACL_SUCCESS)
        return first;
    for (Stream *stream = all_streams; stream != NULL; stream = stream->next) {
        aclError code = stream->alive && stream->context->device == device ? wait_idle(stream, end_ns) : ACL_SUCCESS;
        if (first == ACL_SUCCESS)
            first = code;
    }
    return first;
}

EXPORT aclError aclrtSynchronizeDevice(void)
{
    ENTER(NEEDS_CONTEXT);
    return leave(synchronize_device(-1));
}

EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms)
{
    ENTER(NEEDS_CONTEXT);
    return leave(synchronize_device(timeout_ms));
}

/* --- aborting and asking --- */

EXPORT aclError aclrtStreamAbort(aclrtStream handle)
{
    ENTER(NEEDS_CONTEXT);
    Stream *stream = NULL;
    if (!settings.abort_works)
        return leave(RT_FEATURE_NOT_SUPPORT);
    aclError code = handle == NULL ? ACL_INVALID_PARAM : find_stream(handle, &stream);
    if (code == ACL_SUCCESS)
        stream_abort(stream);
    return leave(code);
}

EXPORT aclError aclrtStreamQuery(aclrtStream handle, int *status)
{
    ENTER(NEEDS_CONTEXT);
    Stream *stream = NULL;
    if (!settings.query_works)
        return leave(RT_FEATURE_NOT_SUPPORT);
    aclError code = status == NULL ? ACL_INVALID_PARAM : find_stream(handle, &stream);
    if (code == ACL_SUCCESS && settings.failed_queries)
        code = stream->failed;
    if (code == ACL_SUCCESS)
        *status = stream->finished < stream->issued;
    return leave(code);
}
