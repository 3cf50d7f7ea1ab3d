/* Memory: of the devices, which the host cannot reach, and of the host, which the devices can.
 *
 * A device block is mapped twice: without any access at the address handed out, and once more for the emulator. It
 * must not know tasks beyond their number per block. */

#define _GNU_SOURCE
#include <string.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emulator.h"

#define PAGE 4096u
#define OFFSET 64u      /* addresses are 64-byte aligned and not more: nobody may count on pages */
#define GUARD 64u       /* bytes at both ends of pinned memory that nobody may write */
#define GUARD_BYTE 0xC7
#define HUGE_PAGE (2u << 20)
#define FRESH_AT_MOST (64u << 20) /* larger blocks keep the kernel's zeros, to save the time */

enum { POLICIES = 8, FIRST_POLICY_BIT = 0x100 };

Usage device_usage[MAX_DEVICES], pinned_usage;
static Block *all_blocks;
static Block *viewed_blocks; /* freed, but a test had asked for their bytes */

static Usage *usage_of(const Block *block)
{
    return block->kind == DEVICE_BLOCK ? &device_usage[block->device] : &pinned_usage;
}

static void enlist(Block *block)
{
    Usage *usage = usage_of(block);
    usage->blocks++;
    usage->bytes += (long long)block->nbytes;
    usage->charged += (long long)block->charged;
    block->next = all_blocks;
    all_blocks = block;
}

static void delist(Block *block)
{
    Usage *usage = usage_of(block);
    usage->blocks--;
    usage->bytes -= (long long)block->nbytes;
    usage->charged -= (long long)block->charged;
    Block **link = &all_blocks;
    while (*link != block)
        link = &(*link)->next;
    *link = block->next;
}

Block *block_at(const void *address)
{
    for (Block *block = all_blocks; block != NULL; block = block->next)
        if ((uintptr_t)address - (uintptr_t)block->address < block->nbytes)
            return block;
    return NULL;
}

/* A test still looks at these bytes: they move into plain memory, at the same place. */
static void keep_for_views(Block *block)
{
    void *copy = mmap(NULL, block->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED)
        return;
    memcpy(copy, block->shadow_mapping, block->mapped);
    mremap(copy, block->mapped, block->mapped, MREMAP_MAYMOVE | MREMAP_FIXED, block->shadow_mapping);
    munmap(block->mapping, block->mapped);
    block->next = viewed_blocks;
    viewed_blocks = block;
}

void blocks_reset(void)
{
    while (viewed_blocks != NULL) {
        Block *block = viewed_blocks;
        viewed_blocks = block->next;
        munmap(block->shadow_mapping, block->mapped);
        free(block);
    }
}

static void destroy(Block *block)
{
    if (block->viewed && block->kind == DEVICE_BLOCK) {
        keep_for_views(block);
        return;
    }
    if (block->mapping != NULL)
        munmap(block->mapping, block->mapped);
    if (block->shadow_mapping != NULL && block->shadow_mapping != block->mapping)
        munmap(block->shadow_mapping, block->mapped);
    free(block);
}

void block_hold(Block *block)
{
    if (block != NULL)
        block->users++;
}

void block_release(Block *block)
{
    if (block != NULL && --block->users == 0 && block->freed)
        destroy(block);
}

/* What the block takes on A2 and A3: 32 bytes more, rounded to 32, and whole huge pages above 1 MiB. */
static size_t charge(size_t size, int policy)
{
    size_t bytes = (size + 63) / 32 * 32;
    int normal = policy == 2 || policy == 5;
    return size > (1u << 20) && !normal ? (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE : bytes;
}

/* Fills in both mappings. -1 when the machine has no memory. */
static int map_device(Block *block)
{
    int file = memfd_create("acl-emulator-device", MFD_CLOEXEC);
    if (file < 0)
        return -1;
    void *shadow = MAP_FAILED, *known = MAP_FAILED;
    if (ftruncate(file, (off_t)block->mapped) == 0) {
        shadow = mmap(NULL, block->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        known = mmap(NULL, block->mapped, PROT_NONE, MAP_SHARED, file, 0);
    }
    close(file);
    block->shadow_mapping = shadow == MAP_FAILED ? NULL : shadow;
    block->mapping = known == MAP_FAILED ? NULL : known;
    return block->mapping != NULL && block->shadow_mapping != NULL ? 0 : -1;
}

static int map_host(Block *block)
{
    void *both = mmap(NULL, block->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (both == MAP_FAILED)
        return -1;
    block->mapping = block->shadow_mapping = both;
    memset((char *)both + OFFSET - GUARD, GUARD_BYTE, GUARD);
    memset((char *)both + OFFSET + block->nbytes, GUARD_BYTE, GUARD);
    return 0;
}

static Block *block_new(int kind, int device, size_t size, size_t charged)
{
    Block *block = calloc(1, sizeof *block);
    if (block == NULL)
        return NULL;
    block->kind = kind;
    block->device = device;
    block->nbytes = size;
    block->charged = charged;
    block->mapped = (size + OFFSET + GUARD + PAGE - 1) / PAGE * PAGE;
    if ((kind == DEVICE_BLOCK ? map_device : map_host)(block) != 0) {
        destroy(block);
        return NULL;
    }
    block->address = (unsigned char *)block->mapping + OFFSET;
    block->shadow = (unsigned char *)block->shadow_mapping + OFFSET;
    if (size <= FRESH_AT_MOST)
        memset(block->shadow, FRESH, size);
    enlist(block);
    return block;
}

static aclError allocate(void **pointer, size_t size, int kind, int device, size_t charged, long long most)
{
    if (pointer == NULL || size == 0)
        return ACL_INVALID_PARAM;
    const Usage *usage = kind == DEVICE_BLOCK ? &device_usage[device] : &pinned_usage;
    if (size > (size_t)most || usage->charged + (long long)charged > most)
        return RT_MEMORY_ALLOCATION;
    Block *block = block_new(kind, device, size, charged);
    if (block == NULL)
        return RT_MEMORY_ALLOCATION;
    *pointer = block->address;
    return ACL_SUCCESS;
}

EXPORT aclError aclrtMalloc(void **pointer, size_t size, int policy)
{
    ENTER(NEEDS_CONTEXT);
    if (policy < 0 || (policy >= POLICIES && policy < FIRST_POLICY_BIT))
        policy = 0;
    return leave(allocate(pointer, size, DEVICE_BLOCK, current_context()->device, charge(size, policy),
                          settings.device_bytes));
}

EXPORT aclError aclrtMallocHost(void **pointer, size_t size)
{
    ENTER(NEEDS_CONTEXT);
    return leave(allocate(pointer, size, PINNED_BLOCK, 0, (size + 63) / 64 * 64, settings.pinned_bytes));
}

static int guards_hold(const Block *block)
{
    if (block->kind != PINNED_BLOCK)
        return 1;
    const unsigned char *before = block->address - GUARD, *after = block->address + block->nbytes;
    for (size_t at = 0; at < GUARD; at++)
        if (before[at] != GUARD_BYTE || after[at] != GUARD_BYTE)
            return 0;
    return 1;
}

/* The free happens, whatever is wrong with it; but what a task in flight uses stays mapped for the emulator's sake. */
static aclError give_back(void *pointer, int kind)
{
    static const char *const names[] = {"device memory", "pinned memory", "registered memory"};
    if (pointer == NULL)
        return ACL_INVALID_PARAM;
    Block *block = block_at(pointer);
    if (block == NULL)
        return violated(RT_PARAM_INVALID, "%p is not allocated (twice freed?)", pointer);
    if (block->kind != kind || block->address != pointer)
        return violated(RT_PARAM_INVALID, "%p is not the start of %s but in a block of %s", pointer, names[kind],
                        names[block->kind]);
    if (block->users > 0)
        violate("%p, %zu bytes, is freed while a copy that uses it is in flight", pointer, block->nbytes);
    if (!guards_hold(block))
        violate("somebody wrote outside %p, %zu bytes", pointer, block->nbytes);
    delist(block);
    block->freed = 1;
    block_hold(block);
    block_release(block);
    return ACL_SUCCESS;
}

EXPORT aclError aclrtFree(void *pointer)
{
    ENTER(NEEDS_CONTEXT);
    return leave(give_back(pointer, DEVICE_BLOCK));
}

EXPORT aclError aclrtFreeHost(void *pointer)
{
    ENTER(NEEDS_CONTEXT);
    return leave(give_back(pointer, PINNED_BLOCK));
}

#define PIN_FLAG 0x10000000u

EXPORT aclError aclrtHostRegisterV2(void *pointer, uint64_t size, uint32_t flag)
{
    ENTER(NEEDS_CONTEXT);
    if (pointer == NULL || size == 0 || (flag & PIN_FLAG) == 0 || (uintptr_t)pointer % PAGE != 0)
        return leave(ACL_INVALID_PARAM);
    if (block_at(pointer) != NULL)
        return leave(RT_HOST_MEMORY_ALREADY_REGISTERED);
    Block *block = calloc(1, sizeof *block);
    if (block == NULL || pinned_usage.charged + (long long)size > settings.pinned_bytes) {
        free(block);
        return leave(RT_MEMORY_ALLOCATION);
    }
    block->kind = REGISTERED_BLOCK;
    block->address = block->shadow = pointer;
    block->nbytes = block->charged = size;
    enlist(block);
    return leave(ACL_SUCCESS);
}

EXPORT aclError aclrtHostUnregister(void *pointer)
{
    ENTER(NEEDS_CONTEXT);
    Block *block = block_at(pointer);
    if (block == NULL || block->kind != REGISTERED_BLOCK)
        return leave(RT_HOST_MEMORY_NOT_REGISTERED);
    return leave(give_back(pointer, REGISTERED_BLOCK));
}
