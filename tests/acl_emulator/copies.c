/* The calls that copy and fill: checks of what they are given, by the rules of the release.
 *
 * What is found right becomes a task. It must not know threads or time. */

#define _GNU_SOURCE
#include <stdlib.h>

#include "emulator.h"

#define ALIGNMENT 64u

static int direction_of(int kind)
{
    return kind == DEVICE_TO_HOST ? 1 : kind == DEVICE_TO_DEVICE || kind == HOST_TO_HOST ? 2 : 0;
}

static int on_device(const void *address)
{
    const Block *block = block_at(address);
    return block != NULL && block->kind == DEVICE_BLOCK;
}

/* 0 to 3, or -1 for one that this release does not document. */
static int plain_kind(int kind, const void *to, const void *from)
{
    if (kind == HOST_TO_BUF_TO_DEVICE)
        return HOST_TO_DEVICE;
    if (kind == BY_POINTERS && ACL_RELEASE >= 85)
        return (on_device(to) ? 1 : 0) + (on_device(from) ? 2 : 0);
    return kind >= HOST_TO_HOST && kind <= DEVICE_TO_DEVICE ? kind : -1;
}

/* One end of a copy: of the right side, within its block, of a device that the context may use. */
static aclError check_end(const void *address, size_t nbytes, int device, int peers_too, const char *role,
                          Block **found)
{
    Block *block = block_at(address);
    int own = current_context()->device;
    *found = block;
    if (device != (block != NULL && block->kind == DEVICE_BLOCK))
        return violated(RT_PARAM_INVALID, "the %s %p is %s memory", role, address,
                        device ? "not in allocated device" : "device");
    if (block == NULL)
        return ACL_SUCCESS;
    if (nbytes > block->nbytes - (size_t)((const unsigned char *)address - block->address))
        return violated(RT_PARAM_INVALID, "the %s %p, %zu bytes, passes the end of its block of %zu bytes", role,
                        address, nbytes, block->nbytes);
    if (device && block->device != own && !(peers_too && peers(own, block->device)))
        return violated(RT_PARAM_INVALID, "the %s is on device %d, the context on device %d", role, block->device, own);
    return ACL_SUCCESS;
}

static unsigned char *shadow_of(const void *address, const Block *block)
{
    return block == NULL ? (unsigned char *)(uintptr_t)address
                         : block->shadow + ((const unsigned char *)address - block->address);
}

static aclError fill_in(Item *item, void *to, size_t room, const void *from, size_t nbytes, int kind)
{
    int within = kind == DEVICE_TO_DEVICE;
    if (nbytes > room)
        return violated(RT_PARAM_INVALID, "%zu bytes do not fit into the %zu of the destination", nbytes, room);
    aclError code = check_end(to, nbytes, kind & HOST_TO_DEVICE, within, "destination", &item->to_block);
    if (code == ACL_SUCCESS)
        code = check_end(from, nbytes, (kind & DEVICE_TO_HOST) != 0, within, "source", &item->from_block);
    if (code != ACL_SUCCESS)
        return code;
    item->to_known = to;
    item->from_known = from;
    item->to = shadow_of(to, item->to_block);
    item->from = shadow_of(from, item->from_block);
    item->nbytes = nbytes;
    return ACL_SUCCESS;
}

/* Whether an async copy may go on after the call. Under the old rules it must; nobody is told, but the bytes suffer. */
static int may_run_on(Item *item)
{
    int pinned = item->to_block != NULL && item->from_block != NULL;
    int aligned = (uintptr_t)item->to_known % ALIGNMENT == 0 && (uintptr_t)item->from_known % ALIGNMENT == 0;
    if (!NEEDS_PINNED)
        return pinned;
    if (!pinned)
        violate("%p to %p: an async copy needs host memory of aclrtMallocHost", (const void *)item->from_known,
                (const void *)item->to_known);
    if (!aligned)
        violate("%p to %p: an async copy needs addresses that 64 divides", (const void *)item->from_known,
                (const void *)item->to_known);
    item->garbage = !pinned || !aligned;
    return 1;
}

static aclError send(Task *task, int kind, int async, aclrtStream handle)
{
    Stream *stream = NULL;
    int wait = 0;
    task->device = current_context()->device;
    task->direction = direction_of(kind);
    if (!async)
        return perform_now(task);
    aclError code = find_stream(handle, &stream);
    if (code == ACL_SUCCESS && kind == HOST_TO_HOST && NEEDS_PINNED)
        code = RT_FEATURE_NOT_SUPPORT;
    if (code != ACL_SUCCESS) {
        task_free(task);
        return code;
    }
    for (size_t index = 0; index < task->count; index++)
        wait |= !may_run_on(&task->items[index]);
    return issue(task, stream, wait);
}

/* --- one copy --- */

static aclError copy(const char *name, void *to, size_t room, const void *from, size_t nbytes, int kind, int async,
                     aclrtStream handle)
{
    if (nbytes == 0)
        return ACL_SUCCESS;
    if (to == NULL || from == NULL)
        return ACL_INVALID_PARAM;
    int plain = plain_kind(kind, to, from);
    if (plain < 0)
        return ACL_INVALID_PARAM;
    Task *task = task_new(name, COPY, 1);
    aclError code = fill_in(task->items, to, room, from, nbytes, plain);
    if (code == ACL_SUCCESS)
        return send(task, plain, async, handle);
    task_free(task);
    return code;
}

EXPORT aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t nbytes, int kind)
{
    ENTER(NEEDS_CONTEXT);
    return leave(copy(__func__, to, room, from, nbytes, kind, 0, NULL));
}

EXPORT aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t nbytes, int kind, aclrtStream stream)
{
    ENTER(NEEDS_CONTEXT);
    return leave(copy(__func__, to, room, from, nbytes, kind, 1, stream));
}

/* --- filling --- */

static aclError fill(const char *name, void *to, size_t room, int value, size_t nbytes, int async, aclrtStream handle)
{
    if (to == NULL || nbytes == 0)
        return ACL_INVALID_PARAM;
    int kind = on_device(to) ? DEVICE_TO_DEVICE : HOST_TO_HOST;
    Task *task = task_new(name, FILL, 1);
    aclError code = fill_in(task->items, to, room, to, nbytes, kind);
    if (code != ACL_SUCCESS) {
        task_free(task);
        return code;
    }
    task->value = value;
    task->items->from = NULL;
    task->items->from_known = NULL;
    task->items->from_block = task->items->to_block;
    return send(task, DEVICE_TO_DEVICE, async, handle);
}

EXPORT aclError aclrtMemset(void *to, size_t room, int32_t value, size_t nbytes)
{
    ENTER(NEEDS_CONTEXT);
    return leave(fill(__func__, to, room, value, nbytes, 0, NULL));
}

EXPORT aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t nbytes, aclrtStream stream)
{
    ENTER(NEEDS_CONTEXT);
    return leave(fill(__func__, to, room, value, nbytes, 1, stream));
}

/* --- batches --- */

typedef struct {
    void **to;
    size_t *rooms;
    void **from;
    size_t *sizes;
    size_t count;
    aclrtMemcpyBatchAttr *attributes;
    size_t *indexes;
    size_t attribute_count;
    size_t *fail_index;
} Batch;

static int is_host(const aclrtMemLocation *location)
{
    return location->type == LOCATION_HOST || location->type == LOCATION_UNREGISTERED;
}

/* The one direction of all attributes; -1 if there is none, or no device of that number. */
static int batch_kind(const Batch *batch)
{
    int kind = -1;
    for (size_t index = 0; index < batch->attribute_count; index++) {
        const aclrtMemLocation *to = &batch->attributes[index].dstLoc, *from = &batch->attributes[index].srcLoc;
        int in = to->type == LOCATION_DEVICE && is_host(from), out = from->type == LOCATION_DEVICE && is_host(to);
        int one = in ? HOST_TO_DEVICE : out ? DEVICE_TO_HOST : -1;
        if (one < 0 || (index > 0 && one != kind) || (in ? to : from)->id != (uint32_t)current_context()->device)
            return -1;
        kind = one;
    }
    return kind;
}

static int in_order(const Batch *batch)
{
    if (batch->attribute_count == 0 || batch->attribute_count > batch->count || batch->indexes[0] != 0)
        return 0;
    for (size_t index = 1; index < batch->attribute_count; index++)
        if (batch->indexes[index] <= batch->indexes[index - 1] || batch->indexes[index] >= batch->count)
            return 0;
    return 1;
}

static aclError batch_items(const Batch *batch, Task *task, int kind)
{
    for (size_t index = 0; index < batch->count; index++) {
        aclError code = RT_PARAM_INVALID;
        if (batch->to[index] != NULL && batch->from[index] != NULL && batch->sizes[index] > 0)
            code = fill_in(&task->items[index], batch->to[index], batch->rooms[index], batch->from[index],
                           batch->sizes[index], kind);
        if (code == ACL_SUCCESS)
            continue;
        if (batch->fail_index != NULL)
            *batch->fail_index = index;
        return code;
    }
    return ACL_SUCCESS;
}

static aclError copy_batch(const char *name, const Batch *batch, int async, aclrtStream handle)
{
    if (!settings.batch_supported)
        return RT_FEATURE_NOT_SUPPORT;
    if (batch->fail_index != NULL)
        *batch->fail_index = SIZE_MAX;
    if (batch->to == NULL || batch->rooms == NULL || batch->from == NULL || batch->sizes == NULL ||
        batch->attributes == NULL || batch->indexes == NULL || batch->count == 0 || batch->count > MAX_BATCH)
        return ACL_INVALID_PARAM;
    int kind = batch_kind(batch);
    if (kind < 0 || !in_order(batch))
        return RT_PARAM_INVALID;
    Task *task = task_new(name, COPY, batch->count);
    aclError code = batch_items(batch, task, kind);
    if (code == ACL_SUCCESS)
        return send(task, kind, async, handle);
    task_free(task);
    return code;
}

#define BATCH_ARGUMENTS                                                                                                \
    void **to, size_t *rooms, void **from, size_t *sizes, size_t count, aclrtMemcpyBatchAttr *attributes,              \
        size_t *indexes, size_t attribute_count

EXPORT aclError aclrtMemcpyBatch(BATCH_ARGUMENTS, size_t *fail_index)
{
    ENTER(NEEDS_CONTEXT);
    Batch batch = {to, rooms, from, sizes, count, attributes, indexes, attribute_count, fail_index};
    return leave(fail_index == NULL ? ACL_INVALID_PARAM : copy_batch(__func__, &batch, 0, NULL));
}

EXPORT aclError aclrtMemcpyBatchAsync(BATCH_ARGUMENTS, size_t *fail_index, aclrtStream stream)
{
    ENTER(NEEDS_CONTEXT);
    Batch batch = {to, rooms, from, sizes, count, attributes, indexes, attribute_count, fail_index};
    return leave(fail_index == NULL ? ACL_INVALID_PARAM : copy_batch(__func__, &batch, 1, stream));
}

EXPORT aclError aclrtMemcpyBatchV2(BATCH_ARGUMENTS)
{
    ENTER(NEEDS_CONTEXT);
    Batch batch = {to, rooms, from, sizes, count, attributes, indexes, attribute_count, NULL};
    return leave(copy_batch(__func__, &batch, 0, NULL));
}

EXPORT aclError aclrtMemcpyBatchAsyncV2(BATCH_ARGUMENTS, aclrtStream stream)
{
    ENTER(NEEDS_CONTEXT);
    Batch batch = {to, rooms, from, sizes, count, attributes, indexes, attribute_count, NULL};
    return leave(copy_batch(__func__, &batch, 1, stream));
}
