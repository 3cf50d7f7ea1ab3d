/* Initialisation, devices and contexts, and what a thread has current.
 *
 * Contexts that were destroyed stay known, so that their use is seen. It must not know memory beyond its sum. */

#define _GNU_SOURCE
#include <stdlib.h>

#include "emulator.h"

int initialised, claimed;
static int ever_initialised;
static Context *all_contexts;
static Context *primaries[MAX_DEVICES];
static char peer_access[MAX_DEVICES][MAX_DEVICES];
static __thread Context *current;

Context *current_context(void) { return current != NULL && current->alive ? current : NULL; }

int peers(int device, int other) { return device == other || peer_access[device][other]; }

aclError check_device(int device)
{
    return device >= 0 && device < settings.devices && device < MAX_DEVICES ? ACL_SUCCESS : RT_INVALID_DEVICEID;
}

static Context *context_new(int device, int primary)
{
    Context *context = calloc(1, sizeof *context);
    context->device = device;
    context->primary = primary;
    context->alive = 1;
    context->next = all_contexts;
    all_contexts = context;
    return context;
}

static Context *find_context(aclrtContext handle)
{
    for (Context *context = all_contexts; context != NULL; context = context->next)
        if (context == handle && context->alive)
            return context;
    return NULL;
}

static long long memory_of(int device)
{
    long long blocks = 0;
    for (int index = 0; index < MAX_DEVICES; index++)
        if (device < 0 || device == index)
            blocks += device_usage[index].blocks;
    return blocks;
}

/* Why nobody may end the library or a device now. */
static void check_ending(int device)
{
    if (claimed)
        violate("the library is shared with somebody who initialised it and still uses it");
    if (memory_of(device) > 0)
        violate("%lld blocks of device memory are allocated", memory_of(device));
}

/* --- initialisation --- */

EXPORT aclError aclInit(const char *path)
{
    ENTER(NEEDS_NOTHING);
    (void)path;
    ever_initialised = 1;
    return leave(initialised++ == 0 ? ACL_SUCCESS : ACL_REPEAT_INITIALIZE);
}

EXPORT aclError aclFinalize(void)
{
    ENTER(NEEDS_NOTHING);
    if (initialised == 0)
        return leave(ever_initialised ? ACL_REPEAT_FINALIZE : ACL_UNINITIALIZE);
    check_ending(-1);
    initialised = 0;
    return leave(ACL_SUCCESS);
}

EXPORT aclError aclFinalizeReference(uint64_t *count)
{
    ENTER(NEEDS_NOTHING);
    if (initialised == 0)
        return leave(ever_initialised ? ACL_REPEAT_FINALIZE : ACL_UNINITIALIZE);
    if (initialised == 1)
        check_ending(-1);
    initialised--;
    if (count != NULL)
        *count = (uint64_t)initialised;
    return leave(ACL_SUCCESS);
}

/* --- devices --- */

EXPORT aclError aclrtGetDeviceCount(uint32_t *count)
{
    ENTER(NEEDS_INIT);
    if (count == NULL)
        return leave(ACL_INVALID_PARAM);
    *count = (uint32_t)settings.devices;
    return leave(ACL_SUCCESS);
}

static Context *primary_of(int device)
{
    if (primaries[device] == NULL || !primaries[device]->alive)
        primaries[device] = context_new(device, 1);
    return primaries[device];
}

EXPORT aclError aclrtSetDevice(int32_t device)
{
    ENTER(NEEDS_INIT);
    if (check_device(device) != ACL_SUCCESS)
        return leave(RT_INVALID_DEVICEID);
    current = primary_of(device);
    current->users++;
    return leave(ACL_SUCCESS);
}

EXPORT aclError aclrtGetDevice(int32_t *device)
{
    ENTER(NEEDS_CONTEXT);
    if (device == NULL)
        return leave(ACL_INVALID_PARAM);
    *device = current->device;
    return leave(ACL_SUCCESS);
}

static void end_context(Context *context)
{
    if (context->by_default != NULL)
        stream_end(context->by_default, 0);
    for (Stream *stream = all_streams; stream != NULL; stream = stream->next)
        if (stream->alive && stream->context == context) {
            violate("a context is destroyed while its stream %p exists", (void *)stream);
            break;
        }
    context->alive = 0;
}

static aclError reset_device(int device, int force)
{
    if (check_device(device) != ACL_SUCCESS)
        return RT_INVALID_DEVICEID;
    check_ending(device);
    Context *context = primaries[device];
    if (context == NULL || !context->alive)
        return RT_INVALID_DEVICEID;
    if (--context->users <= 0 || force)
        end_context(context);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtResetDevice(int32_t device)
{
    ENTER(NEEDS_INIT);
    return leave(reset_device(device, 0));
}

EXPORT aclError aclrtResetDeviceForce(int32_t device)
{
    ENTER(NEEDS_INIT);
    return leave(reset_device(device, 1));
}

EXPORT aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer)
{
    ENTER(NEEDS_INIT);
    if (can == NULL || device == peer)
        return leave(ACL_INVALID_PARAM);
    if (check_device(device) != ACL_SUCCESS || check_device(peer) != ACL_SUCCESS)
        return leave(RT_INVALID_DEVICEID);
    *can = 1;
    return leave(ACL_SUCCESS);
}

static aclError set_peer(int peer, int access)
{
    int device = current->device;
    if (check_device(peer) != ACL_SUCCESS)
        return RT_INVALID_DEVICEID;
    if (peer == device)
        return ACL_INVALID_PARAM;
    peer_access[device][peer] = (char)access;
    return ACL_SUCCESS;
}

EXPORT aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags)
{
    ENTER(NEEDS_CONTEXT);
    return leave(flags != 0 ? ACL_FEATURE_UNSUPPORTED : set_peer(peer, 1));
}

EXPORT aclError aclrtDeviceDisablePeerAccess(int32_t peer)
{
    ENTER(NEEDS_CONTEXT);
    return leave(set_peer(peer, 0));
}

/* --- contexts --- */

EXPORT aclError aclrtCreateContext(aclrtContext *context, int32_t device)
{
    ENTER(NEEDS_INIT);
    if (context == NULL)
        return leave(ACL_INVALID_PARAM);
    if (check_device(device) != ACL_SUCCESS)
        return leave(RT_INVALID_DEVICEID);
    *context = current = context_new(device, 0);
    return leave(ACL_SUCCESS);
}

EXPORT aclError aclrtDestroyContext(aclrtContext handle)
{
    ENTER(NEEDS_INIT);
    Context *context = find_context(handle);
    if (context == NULL)
        return leave(handle == NULL ? ACL_INVALID_PARAM
                                    : violated(RT_INVALID_HANDLE, "%p is no living context", handle));
    if (context->primary)
        return leave(violated(RT_PARAM_INVALID, "the own context of device %d is not the caller's", context->device));
    end_context(context);
    return leave(ACL_SUCCESS);
}

EXPORT aclError aclrtSetCurrentContext(aclrtContext handle)
{
    ENTER(NEEDS_INIT);
    Context *context = find_context(handle);
    if (context == NULL)
        return leave(handle == NULL ? ACL_INVALID_PARAM
                                    : violated(RT_INVALID_HANDLE, "%p is no living context", handle));
    current = context;
    return leave(ACL_SUCCESS);
}

EXPORT aclError aclrtGetCurrentContext(aclrtContext *context)
{
    ENTER(NEEDS_INIT);
    if (context == NULL)
        return leave(ACL_INVALID_PARAM);
    if (current_context() == NULL) {
        if (settings.bare_context_code == ACL_SUCCESS)
            *context = NULL;
        return leave((aclError)settings.bare_context_code);
    }
    *context = current;
    return leave(ACL_SUCCESS);
}

EXPORT aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active)
{
    ENTER(NEEDS_INIT);
    if (active == NULL || flags != NULL)
        return leave(ACL_INVALID_PARAM);
    if (check_device(device) != ACL_SUCCESS)
        return leave(RT_INVALID_DEVICEID);
    *active = primaries[device] != NULL && primaries[device]->alive;
    return leave(ACL_SUCCESS);
}
