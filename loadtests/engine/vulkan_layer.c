/* A layer for Vulkan that counts what a process gives a GPU to do: submissions, and the bytes of
   copies between buffers, where one of the two serves only copies: through such buffers the host
   writes and reads. Types are those of the Vulkan specification and of its loader's interface to
   layers, as far as they are needed. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
typedef Function (*GetFunction)(void *, const char *);
typedef int32_t (*CreateInstance)(const void *, const void *, void **);
typedef int32_t (*CreateDevice)(void *, const void *, const void *, void **);
typedef int32_t (*CreateBuffer)(void *, const void *, const void *, uint64_t *);
typedef int32_t (*Submit)(void *, uint32_t, const void *, uint64_t);
typedef struct {
    uint64_t from, to, size;
} Region;
typedef void (*CopyBuffer)(void *, uint64_t, uint64_t, uint32_t, const Region *);

typedef struct Link {
    struct Link *next;
    GetFunction instance_function, device_function; /* the second one, if it is a device's link */
} Link;
typedef struct {
    uint32_t type;
    const void *next;
    uint32_t function;
    Link *link;
} CreateInfo;
typedef struct {
    uint32_t type;
    const void *next;
    uint32_t flags;
    uint64_t size;
    uint32_t usage;
} BufferInfo;
typedef struct {
    uint32_t type;
    void *next;
    uint32_t version;
    GetFunction instance_function, device_function, gpu_function;
} Interface;

enum {
    INSTANCE_LINK = 47,
    DEVICE_LINK = 48,
    LINK = 0,
    INITIALIZATION_FAILED = -3,
    COPIES = 3, /* the usages of a buffer as the source and as the target of copies */
    INTERFACE_VERSION = 2
};

uint64_t submissions, bytes_up, bytes_down; /* for the process to read */

static GetFunction next_instance_function, next_device_function;
static CreateBuffer next_create_buffer;
static CopyBuffer next_copy_buffer;
static Submit next_submit;
static struct {
    uint64_t buffer;
    uint32_t usage;
} *buffers;
static size_t num_buffers;

/* The layer below, which the loader names when something is created; each layer takes its own. */
static Link *take_link(const void *info, uint32_t type) {
    CreateInfo *each = (CreateInfo *)((const CreateInfo *)info)->next;
    while (each && (each->type != type || each->function != LINK)) each = (CreateInfo *)each->next;
    if (!each) return NULL;
    Link *link = each->link;
    each->link = link->next;
    return link;
}

static int32_t create_instance(const void *info, const void *allocator, void **instance) {
    Link *link = take_link(info, INSTANCE_LINK);
    if (!link) return INITIALIZATION_FAILED;
    next_instance_function = link->instance_function;
    CreateInstance create = (CreateInstance)next_instance_function(NULL, "vkCreateInstance");
    return create(info, allocator, instance);
}

static int32_t create_device(void *gpu, const void *info, const void *allocator, void **device) {
    Link *link = take_link(info, DEVICE_LINK);
    if (!link) return INITIALIZATION_FAILED;
    next_device_function = link->device_function;
    CreateDevice create = (CreateDevice)link->instance_function(NULL, "vkCreateDevice");
    return create(gpu, info, allocator, device);
}

static int32_t create_buffer(void *device, const void *info, const void *allocator, uint64_t *made) {
    int32_t result = next_create_buffer(device, info, allocator, made);
    void *larger = result ? NULL : realloc(buffers, (num_buffers + 1) * sizeof *buffers);
    if (!larger) return result;
    buffers = larger;
    buffers[num_buffers].buffer = *made;
    buffers[num_buffers++].usage = ((const BufferInfo *)info)->usage;
    return result;
}

static int is_for_copies(uint64_t buffer) {
    for (size_t i = num_buffers; i-- > 0;) /* the newest, as handles are used again */
        if (buffers[i].buffer == buffer) return !(buffers[i].usage & ~COPIES);
    return 0;
}

static void copy_buffer(
    void *commands, uint64_t source, uint64_t target, uint32_t count, const Region *regions) {
    uint64_t size = 0;
    for (uint32_t i = 0; i < count; i++) size += regions[i].size;
    if (is_for_copies(source)) bytes_up += size;
    if (is_for_copies(target)) bytes_down += size;
    next_copy_buffer(commands, source, target, count, regions);
}

static int32_t submit(void *queue, uint32_t count, const void *work, uint64_t fence) {
    submissions++;
    return next_submit(queue, count, work, fence);
}

static Function device_function(void *device, const char *name) {
    Function next = next_device_function(device, name);
    if (!strcmp(name, "vkQueueSubmit")) {
        next_submit = (Submit)next;
        return (Function)submit;
    }
    if (!strcmp(name, "vkCreateBuffer")) {
        next_create_buffer = (CreateBuffer)next;
        return (Function)create_buffer;
    }
    if (!strcmp(name, "vkCmdCopyBuffer")) {
        next_copy_buffer = (CopyBuffer)next;
        return (Function)copy_buffer;
    }
    return next;
}

static Function instance_function(void *instance, const char *name) {
    if (!strcmp(name, "vkCreateInstance")) return (Function)create_instance;
    if (!strcmp(name, "vkCreateDevice")) return (Function)create_device;
    return next_instance_function(instance, name);
}

int32_t vkNegotiateLoaderLayerInterfaceVersion(Interface *interface) {
    interface->version = INTERFACE_VERSION;
    interface->instance_function = instance_function;
    interface->device_function = device_function;
    interface->gpu_function = NULL;
    return 0;
}
