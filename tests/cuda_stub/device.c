/* Devices, contexts, streams, errors, and how the bindings find functions. */
#define _GNU_SOURCE
#include "stub.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

enum { MAX_PITCH = 11, UNIFIED_ADDRESSING = 41, CAPABILITY_MAJOR = 75, VMM = 102, VMM_FD = 103, IPC = 125, MPS = 133 };

static __thread struct device *stack[16];
static __thread int depth;

static const struct { CUresult code; const char *name, *text; } results[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult cuGetErrorName(CUresult code, const char **name) {
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        if (results[i].code == code) return *name = results[i].name, CUDA_SUCCESS;
    return *name = NULL, CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char **text) {
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        if (results[i].code == code) return *text = results[i].text, CUDA_SUCCESS;
    return *text = NULL, CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    Dl_info own;
    void *self = dladdr((void *)(uintptr_t)cuGetErrorName, &own) ? dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD) : NULL;
    *function = self ? dlsym(self, symbol) : NULL;
    if (self) dlclose(self);
    if (status) *status = *function ? 0 : 1;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    return cuGetProcAddress_v2(symbol, function, version, flags, status);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    ENTER();
    REQUIRE(device_of(ordinal), CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    ENTER();
    REQUIRE(device_of(device), CUDA_ERROR_INVALID_DEVICE);
    *uuid = device_of(device)->uuid_bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    ENTER();
    REQUIRE(device_of(device), CUDA_ERROR_INVALID_DEVICE);
    snprintf(name, (size_t)length, strncmp(device_of(device)->uuid, "MIG", 3) ? "Stub" : "Stub MIG 1g.10gb");
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    ENTER();
    REQUIRE(device_of(device), CUDA_ERROR_INVALID_DEVICE);
    *bytes = device_of(device)->total_bytes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    ENTER();
    REQUIRE(device_of(device), CUDA_ERROR_INVALID_DEVICE);
    switch (attribute) {
    case MAX_PITCH: *value = (int)number_from("KVSTUB_MAX_PITCH", 2147483647); break;
    case MPS: *value = (int)number_from("KVSTUB_MPS", 0); break;
    case CAPABILITY_MAJOR: *value = 9; break;
    case UNIFIED_ADDRESSING: case VMM: case VMM_FD: case IPC: *value = 1; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice other) {
    ENTER();
    REQUIRE(device_of(device) && device_of(other), CUDA_ERROR_INVALID_DEVICE);
    *can = device != other && !number_from("KVSTUB_NO_PEER", 0);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    ENTER();
    REQUIRE(device_of(device), CUDA_ERROR_INVALID_DEVICE);
    lock();
    *context = device_of(device);
    (*context)->retained++;
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    ENTER();
    REQUIRE(device_of(device), CUDA_ERROR_INVALID_DEVICE);
    lock();
    int retained = device_of(device)->retained > 0;
    device_of(device)->retained -= retained;
    unlock();
    return retained ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

struct device *current_device(void) {
    struct device *current = depth ? stack[depth - 1] : NULL;
    return current && current->retained ? current : NULL;
}

CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER();
    REQUIRE(context && context->retained, CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(depth < 16, CUDA_ERROR_INVALID_VALUE);
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    ENTER();
    REQUIRE(depth, CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (context) *context = stack[depth];
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER();
    depth = context ? 1 : 0;
    stack[0] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    ENTER();
    *context = current_device();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    ENTER();
    REQUIRE(current_device(), CUDA_ERROR_INVALID_CONTEXT);
    for (*device = 0; device_of(*device) != current_device();) ++*device;
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    ENTER();
    return current_device() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    ENTER();
    (void)flags;
    REQUIRE(current_device(), CUDA_ERROR_INVALID_CONTEXT);
    lock();
    *stream = (CUstream)added(STREAM, 0, 0, -1, current_device())->address;
    unlock();
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
    ENTER();
    REQUIRE(current_device(), CUDA_ERROR_INVALID_CONTEXT);
    lock();
    int known = (uintptr_t)stream <= 2 || beginning_at(STREAM, (uintptr_t)stream);
    unlock();
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuStreamDestroy(CUstream stream) {
    ENTER();
    lock();
    struct object *object = beginning_at(STREAM, (uintptr_t)stream);
    if (object) dropped(object);
    unlock();
    return object ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
