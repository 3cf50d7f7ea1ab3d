/* Events: marks in one stream that others, and the host, wait for.
 *
 * Destroyed ones stay known, so that their use is seen. */

#define _GNU_SOURCE
#include <stdlib.h>

#include "emulator.h"

static Event *all_events;
static pthread_cond_t reached = PTHREAD_COND_INITIALIZER;

void event_reached(Event *event, uint64_t mark)
{
    if (event->reached < mark)
        event->reached = mark;
    pthread_cond_broadcast(&reached);
    for (Stream *stream = all_streams; stream != NULL; stream = stream->next)
        pthread_cond_broadcast(&stream->changed);
}

static Event *find_event(aclrtEvent handle)
{
    for (Event *event = all_events; event != NULL; event = event->next)
        if (event == handle && event->alive)
            return event;
    violate("%p is no living event", handle);
    return NULL;
}

static aclError create(aclrtEvent *handle)
{
    if (handle == NULL)
        return ACL_INVALID_PARAM;
    Event *event = calloc(1, sizeof *event);
    event->alive = 1;
    event->next = all_events;
    *handle = all_events = event;
    return ACL_SUCCESS;
}

EXPORT aclError aclrtCreateEvent(aclrtEvent *handle)
{
    ENTER(NEEDS_CONTEXT);
    return leave(create(handle));
}

EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flag)
{
    ENTER(NEEDS_CONTEXT);
    (void)flag;
    return leave(create(handle));
}

EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flag)
{
    ENTER(NEEDS_CONTEXT);
    (void)flag;
    return leave(create(handle));
}

EXPORT aclError aclrtDestroyEvent(aclrtEvent handle)
{
    ENTER(NEEDS_CONTEXT);
    Event *event = find_event(handle);
    if (event == NULL)
        return leave(RT_INVALID_HANDLE);
    if (event->reached < event->recorded)
        violate("event %p is destroyed before it is reached", handle);
    event->alive = 0;
    event_reached(event, event->recorded);
    return leave(ACL_SUCCESS);
}

static aclError mark(aclrtEvent event_handle, aclrtStream handle, int what)
{
    Stream *stream = NULL;
    Event *event = find_event(event_handle);
    aclError code = event == NULL ? RT_INVALID_HANDLE : find_stream(handle, &stream);
    if (code != ACL_SUCCESS)
        return code;
    Task *task = task_new("event", what, 0);
    task->event = event;
    task->mark = what == RECORD ? ++event->recorded : event->recorded;
    stream->ordered |= what == AWAIT;
    return issue(task, stream, 0);
}

EXPORT aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream)
{
    ENTER(NEEDS_CONTEXT);
    return leave(mark(event, stream, RECORD));
}

EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event)
{
    ENTER(NEEDS_CONTEXT);
    return leave(mark(event, stream, AWAIT));
}

EXPORT aclError aclrtQueryEventStatus(aclrtEvent handle, int *status)
{
    ENTER(NEEDS_CONTEXT);
    Event *event = find_event(handle);
    if (event == NULL || status == NULL)
        return leave(event == NULL ? RT_INVALID_HANDLE : ACL_INVALID_PARAM);
    *status = event->reached >= event->recorded;
    return leave(ACL_SUCCESS);
}

static aclError wait_event(aclrtEvent handle, int32_t timeout_ms)
{
    Event *event = find_event(handle);
    if (event == NULL)
        return RT_INVALID_HANDLE;
    if (timeout_ms == 0 || timeout_ms < -1)
        return violated(RT_PARAM_INVALID, "a timeout of %d is not documented", timeout_ms);
    int64_t end_ns = timeout_ms < 0 ? -1 : now_ns() + timeout_ms * 1000000LL;
    uint64_t target = event->recorded;
    int late = 0;
    while (event->reached < target && !late)
        late = wait_for(&reached, end_ns);
    return event->reached < target ? RT_EVENT_SYNC_TIMEOUT : ACL_SUCCESS;
}

EXPORT aclError aclrtSynchronizeEvent(aclrtEvent handle)
{
    ENTER(NEEDS_CONTEXT);
    return leave(wait_event(handle, -1));
}

EXPORT aclError aclrtSynchronizeEventWithTimeout(aclrtEvent handle, int32_t timeout_ms)
{
    ENTER(NEEDS_CONTEXT);
    return leave(wait_event(handle, timeout_ms));
}

__attribute__((constructor)) static void load(void) { condition_init(&reached); }
