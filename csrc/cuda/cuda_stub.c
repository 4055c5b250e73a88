/* The CUDA backend of a build without the toolkit: the same two names, which say what was missing
 * when this library was built (setup.py) and what to do. */
#include <stddef.h>

#include "cuda/cuda.h"

#ifndef SLIDE_CUDA_MISSING
#define SLIDE_CUDA_MISSING "no CUDA toolkit"
#endif

static int available(struct slide_err *err)
{
    return slide_err_set(err, SLIDE_EDEVICE,
                         "this build of slidedp is without CUDA (" SLIDE_CUDA_MISSING
                         " when it was "
                         "built): install the CUDA Toolkit and pip's nvidia-cublas and "
                         "nvidia-cudnn-cu13, then build it again");
}

static int count(void)
{
    return 0;
}

static int device_open(struct slide_device **device, const struct slide_device_options *options,
                       struct slide_err *err)
{
    (void)device;
    (void)options;
    return available(err);
}

int slide_cuda_text(const char *nvidia, char *text, size_t size, struct slide_err *err)
{
    (void)nvidia;
    (void)text;
    (void)size;
    return available(err);
}

/* Nothing else is ever called: there is no device to call it with. */
const struct slide_backend slide_cuda_backend = {
    .name = "cuda", .available = available, .count = count, .open = device_open};
