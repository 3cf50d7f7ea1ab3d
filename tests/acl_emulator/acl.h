/* The names, codes and layouts of AscendCL that the emulator speaks; declared here anew, nothing of CANN is needed.
 *
 * No state and no function bodies. */

#ifndef ACL_H
#define ACL_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef int aclError;
typedef void *aclrtContext;
typedef void *aclrtStream;
typedef void *aclrtEvent;

enum {
    ACL_SUCCESS = 0,
    ACL_INVALID_PARAM = 100000,
    ACL_UNINITIALIZE = 100001,
    ACL_REPEAT_INITIALIZE = 100002,
    ACL_REPEAT_FINALIZE = 100037,
    ACL_FEATURE_UNSUPPORTED = 200006,
    RT_PARAM_INVALID = 107000,
    RT_INVALID_DEVICEID = 107001,
    RT_CONTEXT_NULL = 107002,
    RT_STREAM_CONTEXT = 107003,
    RT_INVALID_HANDLE = 107017,
    RT_STREAM_ABORT = 107023,
    RT_FEATURE_NOT_SUPPORT = 207000,
    RT_MEMORY_ALLOCATION = 207001,
    RT_NO_STREAM_RESOURCE = 207008,
    RT_STREAM_SYNC_TIMEOUT = 507046,
    RT_EVENT_SYNC_TIMEOUT = 507047,
    RT_DRV_INTERNAL_ERROR = 507899,
    RT_HOST_MEMORY_ALREADY_REGISTERED = 507910,
    RT_HOST_MEMORY_NOT_REGISTERED = 507911,
};

enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_POINTERS, HOST_TO_BUF_TO_DEVICE };

enum { LOCATION_HOST, LOCATION_DEVICE, LOCATION_UNREGISTERED };

typedef struct {
    uint32_t id;
    int type;
} aclrtMemLocation;

typedef struct {
    aclrtMemLocation dstLoc;
    aclrtMemLocation srcLoc;
    uint8_t rsv[16];
} aclrtMemcpyBatchAttr;

typedef struct {
    aclrtMemLocation location;
    uint32_t pageSize;
    uint32_t rsv[4];
} aclrtPtrAttributes;

#endif
