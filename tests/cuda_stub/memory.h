/* Memory of devices: memfds that carry the device's UUID and their size in their name. */
#ifndef KVSTUB_MEMORY_H
#define KVSTUB_MEMORY_H

#include "stub.h"

/* A memfd of a device's memory; -1 if the device has no room. */
int new_memory(const struct device *device, size_t size);
/* Maps a memfd, or with -1 nothing, at an address or, with NULL, anywhere; not for forked children. */
void *mapped(void *address, size_t size, int protection, int fd);

#endif
