/* Plain allocations, CUDA IPC, copies and memset. */
#define _GNU_SOURCE
#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int new_memory(const struct device *device, size_t size) {
    char name[128];
    if (used_bytes(device) + size > device->total_bytes) return -1;
    snprintf(name, sizeof name, "kvstub-%s-%zu", device->uuid, size);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) abort();
    /* What another process has left there, as on a device: a little in every 64 KiB. */
    for (size_t at = 0; at < size; at += 65536)
        if (pwrite(fd, "left over", size - at < 9 ? size - at : 9, (off_t)at) < 0) abort();
    return fd;
}

void *mapped(void *address, size_t size, int protection, int fd) {
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    void *place = mmap(address, size, protection, flags | (address ? MAP_FIXED : 0), fd, 0);
    if (place == MAP_FAILED) abort();
    madvise(place, size, MADV_DONTFORK);
    return place;
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    ENTER();
    struct device *device = current_device();
    REQUIRE(device, CUDA_ERROR_INVALID_CONTEXT);
    size_t used = used_bytes(device);
    *total_bytes = device->total_bytes;
    *free_bytes = used < device->total_bytes ? device->total_bytes - used : 0;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t size) {
    ENTER();
    struct device *device = current_device();
    REQUIRE(device, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(size, CUDA_ERROR_INVALID_VALUE);
    int fd = new_memory(device, size);
    REQUIRE(fd >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    lock();
    *address = (uintptr_t)mapped(NULL, size, PROT_READ | PROT_WRITE, fd);
    added(ALLOCATION, *address, size, fd, device)->protection = PROT_READ | PROT_WRITE;
    unlock();
    return CUDA_SUCCESS;
}

/* Unmaps and forgets what begins at an address. */
static CUresult ended(enum kind kind, CUdeviceptr address) {
    lock();
    struct object *object = beginning_at(kind, address);
    if (object) {
        munmap((void *)object->address, object->size);
        dropped(object);
    }
    unlock();
    return object ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFree(CUdeviceptr address) {
    ENTER();
    REQUIRE(current_device(), CUDA_ERROR_INVALID_CONTEXT);
    return ended(ALLOCATION, address);
}

/* What the 64 bytes of a handle are here. */
struct ipc {
    char magic[8], uuid[36 + 4];
    int pid, fd;
    unsigned inode;
    unsigned unused;
};
_Static_assert(sizeof(struct ipc) == sizeof(CUipcMemHandle), "a handle has 64 bytes");

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    ENTER();
    struct ipc content = {.magic = "kvstub", .pid = getpid()};
    struct stat status;
    lock();
    struct object *memory = around(ALLOCATION, address, 1);
    if (memory && !fstat(memory->fd, &status)) {
        memcpy(content.uuid, memory->device->uuid, sizeof content.uuid);
        content.fd = memory->fd;
        content.inode = (unsigned)status.st_ino;
    }
    unlock();
    REQUIRE(memory, CUDA_ERROR_INVALID_VALUE);
    memcpy(handle, &content, sizeof content);
    return CUDA_SUCCESS;
}

static CUresult opened(const struct ipc *content, CUdeviceptr *address) {
    char path[64], uuid[sizeof content->uuid + 1] = {0};
    struct stat status;
    memcpy(uuid, content->uuid, sizeof content->uuid);
    REQUIRE(!memcmp(content->magic, "kvstub", 7), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(content->pid != getpid(), CUDA_ERROR_INVALID_CONTEXT);
    struct device *device = device_named(uuid);
    REQUIRE(device, CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(device == current_device() || !number_from("KVSTUB_NO_PEER", 0), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    snprintf(path, sizeof path, "/proc/%d/fd/%d", content->pid, content->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    REQUIRE(fd >= 0, CUDA_ERROR_INVALID_HANDLE);
    int same = !fstat(fd, &status) && (unsigned)status.st_ino == content->inode;
    CUresult result = same ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    if (same && opened_memory(status.st_ino)) result = CUDA_ERROR_ALREADY_MAPPED;
    if (result == CUDA_SUCCESS) {
        size_t size = (size_t)status.st_size;
        *address = (uintptr_t)mapped(NULL, size, PROT_READ | PROT_WRITE, fd);
        struct object *object = added(OPENED, *address, size, -1, device);
        object->inode = status.st_ino;
        object->protection = PROT_READ | PROT_WRITE;
    }
    close(fd);
    return result;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    ENTER();
    REQUIRE(current_device(), CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(flags == 1, CUDA_ERROR_INVALID_VALUE); /* peer access as needed: the driver knows no other flag */
    struct ipc content;
    memcpy(&content, &handle, sizeof content);
    lock();
    CUresult result = opened(&content, address);
    unlock();
    return result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER();
    REQUIRE(current_device(), CUDA_ERROR_INVALID_CONTEXT);
    return ended(OPENED, address);
}

/* Whether a call may read, or write, all of [address, address + size); neighbouring mappings count as one. */
static CUresult usable(CUdeviceptr address, size_t size, int protection) {
    static const enum kind kinds[] = {ALLOCATION, OPENED, MAPPING};
    REQUIRE(current_device(), CUDA_ERROR_INVALID_CONTEXT);
    uintptr_t at = address, end = address + size;
    lock();
    while (at < end) {
        struct object *memory = NULL;
        for (int i = 0; i < 3 && !memory; i++) memory = around(kinds[i], at, 1);
        if (!memory || !(memory->protection & protection)) break;
        at = memory->address + memory->size;
    }
    unlock();
    return at >= end ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

static CUresult copied(CUdeviceptr to, CUdeviceptr from, size_t size) {
    CUresult refused = usable(from, size, PROT_READ);
    if (refused == CUDA_SUCCESS) refused = usable(to, size, PROT_WRITE);
    if (refused == CUDA_SUCCESS) memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, size);
    return refused;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    ENTER();
    (void)stream;
    return copied(to, from, size);
}

CUresult cuMemcpyDtoD(CUdeviceptr to, CUdeviceptr from, size_t size) {
    ENTER();
    return copied(to, from, size);
}

CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *plan, CUstream stream) {
    ENTER();
    (void)stream;
    size_t most = (size_t)number_from("KVSTUB_MAX_PITCH", 2147483647);
    REQUIRE(plan->srcMemoryType == 2 && plan->dstMemoryType == 2, CUDA_ERROR_NOT_SUPPORTED);
    REQUIRE(plan->WidthInBytes <= plan->srcPitch && plan->WidthInBytes <= plan->dstPitch, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(plan->srcPitch <= most && plan->dstPitch <= most, CUDA_ERROR_INVALID_VALUE);
    CUdeviceptr from = plan->srcDevice + plan->srcXInBytes + plan->srcY * plan->srcPitch;
    CUdeviceptr to = plan->dstDevice + plan->dstXInBytes + plan->dstY * plan->dstPitch;
    for (size_t row = 0; row < plan->Height; row++) {
        CUresult failed = copied(to + row * plan->dstPitch, from + row * plan->srcPitch, plan->WidthInBytes);
        if (failed != CUDA_SUCCESS) return failed;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) {
    ENTER();
    CUresult refused = usable(from, size, PROT_READ);
    if (refused == CUDA_SUCCESS) memcpy(to, (const void *)(uintptr_t)from, size);
    return refused;
}

CUresult cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t size) {
    ENTER();
    CUresult refused = usable(to, size, PROT_WRITE);
    if (refused == CUDA_SUCCESS) memcpy((void *)(uintptr_t)to, from, size);
    return refused;
}

CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t size, CUstream stream) {
    ENTER();
    (void)stream;
    CUresult refused = usable(at, size, PROT_WRITE);
    if (refused == CUDA_SUCCESS) memset((void *)(uintptr_t)at, value, size);
    return refused;
}
