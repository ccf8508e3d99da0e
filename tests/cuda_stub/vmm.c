/* Virtual memory management: physical memory by handle and descriptor, ranges of addresses, mappings in them. */
#define _GNU_SOURCE
#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEVICE_LOCATION = 1, POSIX_DESCRIPTOR = 1, READ = 1, READ_WRITE = 3 };

static size_t granularity(void) { return (size_t)number_from("KVSTUB_GRANULARITY", 2 << 20); }

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *memory, int option) {
    ENTER();
    (void)option;
    REQUIRE(memory->location.type == DEVICE_LOCATION, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_of(memory->location.id), CUDA_ERROR_INVALID_DEVICE);
    *bytes = granularity();
    return CUDA_SUCCESS;
}

static CUmemGenericAllocationHandle handle_of(int fd, size_t size, struct device *device) {
    lock();
    uintptr_t handle = added(HANDLE, 0, size, fd, device)->address;
    unlock();
    return handle;
}

CUresult cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *memory, uint64_t flags) {
    ENTER();
    REQUIRE(!flags && memory->type == 1 && memory->location.type == DEVICE_LOCATION, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_of(memory->location.id), CUDA_ERROR_INVALID_DEVICE);
    REQUIRE(size && size % granularity() == 0, CUDA_ERROR_INVALID_VALUE);
    int fd = new_memory(device_of(memory->location.id), size);
    REQUIRE(fd >= 0, CUDA_ERROR_OUT_OF_MEMORY);
    *handle = handle_of(fd, size, device_of(memory->location.id));
    return CUDA_SUCCESS;
}

/* A descriptor of its own for the memory behind a handle; -1 if there is no such handle. */
static int another_descriptor(CUmemGenericAllocationHandle handle, size_t *size) {
    lock();
    struct object *object = beginning_at(HANDLE, handle);
    int fd = object ? fcntl(object->fd, F_DUPFD_CLOEXEC, 0) : -1;
    if (object) *size = object->size;
    unlock();
    return fd;
}

CUresult cuMemExportToShareableHandle(int *fd, CUmemGenericAllocationHandle handle, int type, uint64_t flags) {
    ENTER();
    size_t size;
    REQUIRE(type == POSIX_DESCRIPTOR && !flags, CUDA_ERROR_INVALID_VALUE);
    *fd = another_descriptor(handle, &size);
    return *fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *descriptor, int type) {
    ENTER();
    char path[64], link[256] = {0}, uuid[64];
    int fd = (int)(intptr_t)descriptor;
    struct stat status;
    REQUIRE(type == POSIX_DESCRIPTOR, CUDA_ERROR_INVALID_VALUE);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    REQUIRE(readlink(path, link, sizeof link - 1) > 0, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(sscanf(link, "/memfd:kvstub-%40s", uuid) == 1 && !fstat(fd, &status), CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_named(uuid), CUDA_ERROR_INVALID_DEVICE);
    *handle = handle_of(fcntl(fd, F_DUPFD_CLOEXEC, 0), (size_t)status.st_size, device_named(uuid));
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER();
    lock();
    struct object *object = beginning_at(HANDLE, handle);
    if (object) dropped(object);
    unlock();
    return object ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wish, uint64_t flags) {
    ENTER();
    (void)wish;
    size_t step = alignment > granularity() ? alignment : granularity();
    REQUIRE(size && size % granularity() == 0 && !flags, CUDA_ERROR_INVALID_VALUE);
    lock();
    uintptr_t all = (uintptr_t)mapped(NULL, size + step, PROT_NONE, -1);
    uintptr_t first = (all + step - 1) / step * step;
    if (first > all) munmap((void *)all, first - all);
    if (all + step > first) munmap((void *)(first + size), all + step - first);
    added(RANGE, first, size, -1, NULL);
    unlock();
    *address = first;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    ENTER();
    lock();
    struct object *range = beginning_at(RANGE, address);
    int fits = range && range->size == size && !touching(MAPPING, address, size);
    if (fits) {
        munmap((void *)range->address, size);
        dropped(range);
    }
    unlock();
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, uint64_t flags) {
    ENTER();
    lock();
    struct object *memory = beginning_at(HANDLE, handle);
    int fits = memory && size && size <= memory->size && size % granularity() == 0 && !offset && !flags &&
               address % granularity() == 0 && around(RANGE, address, size) && !touching(MAPPING, address, size);
    if (fits) {
        mapped((void *)(uintptr_t)address, size, PROT_NONE, memory->fd);
        added(MAPPING, address, size, -1, memory->device);
    }
    unlock();
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    ENTER();
    lock();
    struct object *mapping = beginning_at(MAPPING, address);
    int fits = mapping && mapping->size == size;
    if (fits) {
        mapped((void *)(uintptr_t)address, size, PROT_NONE, -1);
        dropped(mapping);
    }
    unlock();
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    ENTER();
    REQUIRE(count == 1 && access->location.type == DEVICE_LOCATION, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(access->flags == 0 || access->flags == READ || access->flags == READ_WRITE, CUDA_ERROR_INVALID_VALUE);
    REQUIRE(device_of(access->location.id), CUDA_ERROR_INVALID_DEVICE);
    int protection = access->flags == READ_WRITE ? PROT_READ | PROT_WRITE : access->flags ? PROT_READ : PROT_NONE;
    uintptr_t at = address, end = address + size;
    lock();
    while (at < end) {
        struct object *mapping = beginning_at(MAPPING, at);
        if (!mapping || mapping->size > end - at) break;
        at += mapping->size;
    }
    int fits = size && at == end;
    for (at = address; fits && at < end;) {
        struct object *mapping = beginning_at(MAPPING, at);
        mapping->protection = protection;
        mprotect((void *)at, mapping->size, protection);
        at += mapping->size;
    }
    unlock();
    return fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
