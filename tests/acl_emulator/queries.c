/* Calls that only ask: memory, pointers, names, versions, messages. */

#define _GNU_SOURCE
#include <string.h>

#include "emulator.h"

#define LAST_ATTRIBUTE 17
#define PAGE_BYTES 4096

/* The attributes of the device's own DDR tell zeros: these devices have HBM only. */
static int names_hbm(int attribute) { return attribute == 1 || attribute == 4 || attribute == 5 || attribute >= 8; }

EXPORT aclError aclrtGetMemInfo(int attribute, size_t *free_bytes, size_t *total)
{
    ENTER(NEEDS_CONTEXT);
    if (free_bytes == NULL || total == NULL || attribute < 0 || attribute > LAST_ATTRIBUTE)
        return leave(ACL_INVALID_PARAM);
    long long used = device_usage[current_context()->device].charged, all = settings.device_bytes;
    *total = names_hbm(attribute) ? (size_t)all : 0;
    *free_bytes = names_hbm(attribute) && all > used ? (size_t)(all - used) : 0;
    return leave(ACL_SUCCESS);
}

EXPORT aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes)
{
    ENTER(NEEDS_CONTEXT);
    if (!settings.pointer_attributes)
        return leave(RT_FEATURE_NOT_SUPPORT);
    if (pointer == NULL || attributes == NULL)
        return leave(ACL_INVALID_PARAM);
    const Block *block = block_at(pointer);
    int device = block != NULL && block->kind == DEVICE_BLOCK;
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = device ? LOCATION_DEVICE : block != NULL ? LOCATION_HOST : LOCATION_UNREGISTERED;
    attributes->location.id = device ? (uint32_t)block->device : 0;
    attributes->pageSize = PAGE_BYTES;
    return leave(ACL_SUCCESS);
}

EXPORT const char *aclrtGetSocName(void)
{
    if (enter(__func__, NEEDS_INIT) != ACL_SUCCESS)
        return NULL;
    leave(ACL_SUCCESS);
    return "AscendEmulated";
}

EXPORT aclError aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch)
{
    ENTER(NEEDS_NOTHING);
    if (major == NULL || minor == NULL || patch == NULL)
        return leave(ACL_INVALID_PARAM);
    *major = 1;
    *minor = ACL_RELEASE >= 90 ? 17 : ACL_RELEASE >= 85 ? 15 : 13;
    *patch = 0;
    return leave(ACL_SUCCESS);
}

EXPORT const char *aclGetRecentErrMsg(void)
{
    if (enter(__func__, NEEDS_NOTHING) != ACL_SUCCESS)
        return NULL;
    leave(ACL_SUCCESS);
    return recent_message();
}
