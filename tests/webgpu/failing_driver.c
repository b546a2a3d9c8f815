/* A driver for Vulkan that passes everything on to the driver that REAL_DRIVER names, and fails as
   a file says that DRIVER_FAULT names: "lost" loses the device with the next work, "crash" ends the
   process when it is loaded. Types are those of the Vulkan specification, as far as they are needed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void (*Function)(void);
typedef Function (*GetFunction)(void *, const char *);
typedef int32_t (*Submit)(void *, uint32_t, const void *, void *);

enum { DEVICE_LOST = -4 };

static GetFunction real_instance_function, real_device_function;
static Submit real_submit;

static void *driver(void) {
    static void *library;
    if (!library) library = dlopen(getenv("REAL_DRIVER"), RTLD_NOW | RTLD_LOCAL);
    return library;
}

static int has_fault(const char *fault) {
    char found[16] = "";
    FILE *file = fopen(getenv("DRIVER_FAULT"), "r");
    if (!file) return 0;
    if (!fgets(found, sizeof found, file)) found[0] = 0;
    fclose(file);
    return strcmp(found, fault) == 0;
}

static int32_t submit(void *queue, uint32_t count, const void *work, void *fence) {
    return has_fault("lost") ? DEVICE_LOST : real_submit(queue, count, work, fence);
}

static Function device_function(void *device, const char *name) {
    Function found = real_device_function(device, name);
    if (strcmp(name, "vkQueueSubmit") != 0) return found;
    real_submit = (Submit)found;
    return (Function)submit;
}

Function vk_icdGetInstanceProcAddr(void *instance, const char *name) {
    if (!real_instance_function) {
        if (has_fault("crash")) abort();
        real_instance_function = (GetFunction)dlsym(driver(), "vk_icdGetInstanceProcAddr");
    }
    Function found = real_instance_function(instance, name);
    if (strcmp(name, "vkGetDeviceProcAddr") != 0) return found;
    real_device_function = (GetFunction)found;
    return (Function)device_function;
}

int32_t vk_icdNegotiateLoaderICDInterfaceVersion(uint32_t *version) {
    int32_t (*real)(uint32_t *) =
        (int32_t(*)(uint32_t *))dlsym(driver(), "vk_icdNegotiateLoaderICDInterfaceVersion");
    return real(version);
}

Function vk_icdGetPhysicalDeviceProcAddr(void *instance, const char *name) {
    GetFunction real = (GetFunction)dlsym(driver(), "vk_icdGetPhysicalDeviceProcAddr");
    return real ? real(instance, name) : NULL;
}
