/* Devices by environment, faults by environment, and the table of all that lives. */
#define _GNU_SOURCE
#include "stub.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MOST_DEVICES 16
#define MOST_OBJECTS 4096

static struct device all[MOST_DEVICES], *visible[MOST_DEVICES];
static int all_count, visible_count, initialised;
static struct object objects[MOST_OBJECTS];
static pthread_mutex_t table = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t faults = PTHREAD_MUTEX_INITIALIZER;

long long number_from(const char *variable, long long otherwise) {
    const char *text = getenv(variable);
    return text && *text ? atoll(text) : otherwise;
}

static void read_device(const char *entry) {
    struct device *device = &all[all_count];
    if (all_count == MOST_DEVICES || sscanf(entry, "%63[^:]:%zu", device->uuid, &device->total_bytes) != 2) return;
    int digits = 0;
    for (const char *c = device->uuid + 4; *c && digits < 16; c++) {
        unsigned value;
        if (*c == '-') continue;
        if (sscanf(c++, "%2x", &value) != 1) return;
        device->uuid_bytes.bytes[digits++] = (char)value;
    }
    all_count++;
}

/* CUDA_VISIBLE_DEVICES: ordinals or UUIDs (a beginning will do); the first that names no device ends the list. */
static struct device *chosen(const char *entry) {
    for (int i = 0; i < all_count; i++)
        if (!strncmp(entry, "GPU-", 4) || !strncmp(entry, "MIG-", 4) ? !strncmp(all[i].uuid, entry, strlen(entry))
                                                                     : i == atoi(entry) && *entry != '-')
            return &all[i];
    return NULL;
}

CUresult cuInit(unsigned int flags) {
    (void)flags;
    lock();
    if (!initialised) {
        char *saved, text[4096];
        snprintf(text, sizeof text, "%s", getenv("KVSTUB_DEVICES") ? getenv("KVSTUB_DEVICES") : "");
        for (char *entry = strtok_r(text, ",", &saved); entry; entry = strtok_r(NULL, ",", &saved)) read_device(entry);
        const char *filter = getenv("CUDA_VISIBLE_DEVICES");
        snprintf(text, sizeof text, "%s", filter ? filter : "");
        for (int i = 0; !filter && i < all_count; i++) visible[visible_count++] = &all[i];
        for (char *entry = strtok_r(text, ",", &saved); entry; entry = strtok_r(NULL, ",", &saved)) {
            if (visible_count == MOST_DEVICES || !chosen(entry)) break;
            visible[visible_count++] = chosen(entry);
        }
        initialised = 1;
    }
    unlock();
    CUresult told = entered("cuInit");
    return told != CUDA_SUCCESS ? told : visible_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

CUresult cuDeviceGetCount(int *count) {
    ENTER();
    *count = visible_count;
    return CUDA_SUCCESS;
}

struct device *device_of(CUdevice ordinal) {
    return ordinal >= 0 && ordinal < visible_count ? visible[ordinal] : NULL;
}

struct device *device_named(const char *uuid) {
    for (int i = 0; i < visible_count; i++)
        if (!strcmp(visible[i]->uuid, uuid)) return visible[i];
    return NULL;
}

/* Whether an environment variable "FUNCTION:REST" speaks of this function; where REST begins, or NULL. */
static const char *told(const char *variable, const char *function) {
    const char *text = getenv(variable);
    size_t length = strlen(function);
    return text && !strncmp(text, function, length) && text[length] == ':' ? text + length + 1 : NULL;
}

/* KVSTUB_FAIL=FUNCTION:N[:CODE] from the N-th call on, counted anew whenever the variable changes. */
static CUresult fault(const char *function) {
    static char seen[128];
    static int calls;
    const char *rest = told("KVSTUB_FAIL", function);
    int first = 1, code = CUDA_ERROR_UNKNOWN;
    if (!rest) return CUDA_SUCCESS;
    sscanf(rest, "%d:%d", &first, &code);
    pthread_mutex_lock(&faults);
    if (strcmp(seen, getenv("KVSTUB_FAIL"))) {
        snprintf(seen, sizeof seen, "%s", getenv("KVSTUB_FAIL"));
        calls = 0;
    }
    int due = ++calls >= first;
    pthread_mutex_unlock(&faults);
    return due ? code : CUDA_SUCCESS;
}

static void pause_for(double seconds, const char *file) {
    const struct timespec piece = {0, 10000000};
    for (; seconds > 0 && (!file || access(file, F_OK) == 0); seconds -= 0.01) nanosleep(&piece, NULL);
}

CUresult entered(const char *function) {
    const char *slow = told("KVSTUB_SLOW", function);
    const char *file = slow ? strchr(slow, ':') : NULL;
    if (slow) pause_for(atof(slow), file ? file + 1 : NULL);
    return initialised ? fault(function) : CUDA_ERROR_NOT_INITIALIZED;
}

void lock(void) { pthread_mutex_lock(&table); }
void unlock(void) { pthread_mutex_unlock(&table); }

struct object *added(enum kind kind, uintptr_t address, size_t size, int fd, struct device *device) {
    for (int i = 0; i < MOST_OBJECTS; i++)
        if (objects[i].kind == NOTHING) {
            uintptr_t own = address ? address : (uintptr_t)&objects[i];
            objects[i] = (struct object){.kind = kind, .address = own, .size = size, .fd = fd, .device = device};
            return &objects[i];
        }
    abort(); /* a leak of the code under test */
}

struct object *around(enum kind kind, uintptr_t address, size_t size) {
    for (int i = 0; i < MOST_OBJECTS; i++)
        if (objects[i].kind == kind && address >= objects[i].address && size <= objects[i].size &&
            address - objects[i].address <= objects[i].size - size)
            return &objects[i];
    return NULL;
}

struct object *touching(enum kind kind, uintptr_t address, size_t size) {
    for (int i = 0; i < MOST_OBJECTS; i++)
        if (objects[i].kind == kind && objects[i].address < address + size &&
            address < objects[i].address + objects[i].size)
            return &objects[i];
    return NULL;
}

struct object *beginning_at(enum kind kind, uintptr_t address) {
    for (int i = 0; i < MOST_OBJECTS; i++)
        if (objects[i].kind == kind && objects[i].address == address) return &objects[i];
    return NULL;
}

struct object *opened_memory(unsigned long long inode) {
    for (int i = 0; i < MOST_OBJECTS; i++)
        if (objects[i].kind == OPENED && objects[i].inode == inode) return &objects[i];
    return NULL;
}

void dropped(struct object *object) {
    if (object->fd >= 0) close(object->fd);
    object->kind = NOTHING;
}

/* For tests: how many objects live in this process. */
int kvstub_live_count(void) {
    int count = 0;
    lock();
    for (int i = 0; i < MOST_OBJECTS; i++) count += objects[i].kind != NOTHING;
    unlock();
    return count;
}

/* Memory found so far, each once. */
struct found {
    const char *name; /* how a link to the device's memory begins, "/memfd:kvstub-UUID-" */
    unsigned long long inodes[MOST_OBJECTS];
    int count;
    size_t bytes;
};

static void find(struct found *found, unsigned long long inode, const char *name_and_size) {
    for (int i = 0; i < found->count; i++)
        if (found->inodes[i] == inode) return;
    if (found->count < MOST_OBJECTS) found->inodes[found->count++] = inode;
    found->bytes += strtoull(name_and_size + strlen(found->name), NULL, 10);
}

static void find_open(struct found *found, const char *process) {
    char folder[64], path[384], link[256];
    snprintf(folder, sizeof folder, "/proc/%.20s/fd", process);
    DIR *entries = opendir(folder);
    if (!entries) return;
    for (struct dirent *entry = readdir(entries); entry; entry = readdir(entries)) {
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        ssize_t length = readlink(path, link, sizeof link - 1);
        struct stat status;
        if (length < 0) continue;
        link[length] = 0;
        if (!strncmp(link, found->name, strlen(found->name)) && !stat(path, &status)) find(found, status.st_ino, link);
    }
    closedir(entries);
}

static void find_mapped(struct found *found, const char *process) {
    char path[64], line[512];
    unsigned long long inode;
    snprintf(path, sizeof path, "/proc/%.20s/maps", process);
    FILE *lines = fopen(path, "re");
    if (!lines) return;
    while (fgets(line, sizeof line, lines)) {
        const char *name = strstr(line, found->name);
        if (name && sscanf(line, "%*s %*s %*s %*s %llu", &inode) == 1) find(found, inode, name);
    }
    fclose(lines);
}

size_t used_bytes(const struct device *device) {
    char name[96];
    snprintf(name, sizeof name, "/memfd:kvstub-%s-", device->uuid);
    struct found found = {.name = name};
    DIR *processes = opendir("/proc");
    for (struct dirent *entry = processes ? readdir(processes) : NULL; entry; entry = readdir(processes)) {
        if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
        find_open(&found, entry->d_name);
        find_mapped(&found, entry->d_name);
    }
    if (processes) closedir(processes);
    return found.bytes;
}
