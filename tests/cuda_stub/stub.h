/* What the parts of the stub driver share: the driver's types and codes as far as they are used, and its objects. */
#ifndef KVSTUB_H
#define KVSTUB_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct device *CUcontext;
typedef void *CUstream;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_ALREADY_MAPPED = 208,
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_UNKNOWN = 999,
};

typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcMemHandle;
typedef struct { int type, id; } CUmemLocation;
typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    unsigned char allocFlags[8];
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct {
    size_t srcXInBytes, srcY;
    int srcMemoryType;
    const void *srcHost;
    CUdeviceptr srcDevice;
    void *srcArray;
    size_t srcPitch, dstXInBytes, dstY;
    int dstMemoryType;
    void *dstHost;
    CUdeviceptr dstDevice;
    void *dstArray;
    size_t dstPitch, WidthInBytes, Height;
} CUDA_MEMCPY2D;

struct device {
    char uuid[64]; /* as text, "GPU-..." or "MIG-..." */
    CUuuid uuid_bytes;
    size_t total_bytes;
    int retained; /* how often its primary context is */
};

/* The device of an ordinal of this process, or of a UUID's text; NULL if there is none. */
struct device *device_of(CUdevice ordinal);
struct device *device_named(const char *uuid);
/* The device of the calling thread's context; NULL if it has none. */
struct device *current_device(void);
/* The value of an environment variable as a number, or what stands for its absence. */
long long number_from(const char *variable, long long otherwise);
/* Bytes of a device that any process holds on to, by descriptor or mapping. */
size_t used_bytes(const struct device *device);

/* What every call begins with: it may be told to take long or to fail, and needs cuInit before it. */
CUresult entered(const char *function);
#define ENTER() \
    do { \
        CUresult refused = entered(__func__); \
        if (refused != CUDA_SUCCESS) return refused; \
    } while (0)
#define REQUIRE(condition, code) \
    do { \
        if (!(condition)) return (code); \
    } while (0)

/* Everything that lives until a call ends it. A handle's address is its own number. */
enum kind { NOTHING = 0, HANDLE, RANGE, MAPPING, ALLOCATION, OPENED, STREAM };
struct object {
    enum kind kind;
    uintptr_t address;
    size_t size;
    int fd; /* of the memory: HANDLE, ALLOCATION; else -1 */
    int protection; /* MAPPING, ALLOCATION, OPENED */
    unsigned long long inode; /* OPENED: of the memory */
    struct device *device;
};

void lock(void);
void unlock(void);
struct object *added(enum kind kind, uintptr_t address, size_t size, int fd, struct device *device);
/* The object of a kind that begins at an address; NULL if there is none. */
struct object *beginning_at(enum kind kind, uintptr_t address);
/* The object of a kind that has all of [address, address + size) in it. */
struct object *around(enum kind kind, uintptr_t address, size_t size);
/* Any object of a kind with some of [address, address + size) in it. */
struct object *touching(enum kind kind, uintptr_t address, size_t size);
struct object *opened_memory(unsigned long long inode);
void dropped(struct object *object);

#endif
