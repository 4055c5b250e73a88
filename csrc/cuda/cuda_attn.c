/* Attention: through cuDNN where it has the shape and is the faster, else by our own kernels, which
 * have every shape. What was chosen for a shape, and why not cuDNN, is said once (level 2 of the
 * log; a warning where cuDNN itself is missing). SLIDE_ATTENTION forces one of them.
 * Called through the device's table. */
#include <string.h>

#include "base/env.h"
#include "base/log.h"
#include "base/mem.h"
#include "cuda/cuda_inside.h"

struct slide_cuda_attn {
    struct slide_cuda_cudnn *cudnn; /* NULL: not here, or not wanted */
    bool only;                      /* SLIDE_ATTENTION=cudnn */
    bool said;                      /* why a shape doesn't go through it */
};

int slide_cuda_attn_open(struct slide_device *device, struct slide_err *err)
{
    const char *want = slide_env_get("SLIDE_ATTENTION");
    struct slide_err why = SLIDE_ERR_INIT;
    struct slide_cuda_attn *a = slide_mem_new(sizeof *a, err);
    device->attn = a;
    if (!a)
        return -1;
    if (strcmp(want, "auto") && strcmp(want, "cudnn") && strcmp(want, "own"))
        return slide_err_set(err, SLIDE_EINVAL, "SLIDE_ATTENTION=%s: auto, cudnn or own", want);
    if (!strcmp(want, "own"))
        return 0;
    a->only = !strcmp(want, "cudnn");
    a->cudnn = slide_cuda_cudnn_open(device, a->only ? err : &why);
    if (!a->cudnn && a->only)
        return -1;
    if (!a->cudnn)
        slide_log(device->options.rank, SLIDE_LOG_WARN,
                  "attention runs on the slower kernels of our own: %s", why.text);
    return 0;
}

void slide_cuda_attn_close(struct slide_device *device)
{
    if (device->attn)
        slide_cuda_cudnn_close(device->attn->cudnn);
    slide_mem_free(device->attn);
    device->attn = NULL;
}

/* 1: cuDNN; 0: our own; -1: cuDNN was ordered and refuses. */
static int by_cudnn(struct slide_device *device, const struct slide_attn *attn,
                    struct slide_err *err)
{
    struct slide_cuda_attn *a = device->attn;
    struct slide_err why = SLIDE_ERR_INIT;
    if (!a->cudnn)
        return 0;
    if (slide_cuda_cudnn_supports(a->cudnn, attn, &why))
        return 1;
    if (a->only)
        return slide_err_set(err, SLIDE_EDEVICE, "SLIDE_ATTENTION=cudnn: %s", why.text);
    if (!a->said)
        slide_log(device->options.rank, SLIDE_LOG_INFO,
                  "attention of this kind runs on our own kernels: %s", why.text);
    a->said = true;
    return 0;
}

size_t slide_cuda_attn_workspace(struct slide_device *device, const struct slide_attn *attn)
{
    /* Whatever a pass needs: documents go one way, rows without them another. */
    size_t own = slide_cuda_flash_workspace(device, attn);
    size_t theirs = by_cudnn(device, attn, NULL) == 1
                        ? slide_cuda_cudnn_workspace(device->attn->cudnn, attn)
                        : 0;
    return own > theirs ? own : theirs;
}

int slide_cuda_attn_fwd(struct slide_lane *lane, const struct slide_attn *attn,
                        struct slide_err *err)
{
    switch (by_cudnn(lane->device, attn, err)) {
    case 1:
        return slide_cuda_cudnn_fwd(lane->device->attn->cudnn, lane, attn, err);
    case 0:
        return slide_cuda_flash_fwd(lane, attn, err);
    }
    return -1;
}

int slide_cuda_attn_bwd(struct slide_lane *lane, const struct slide_attn *attn,
                        struct slide_err *err)
{
    switch (by_cudnn(lane->device, attn, err)) {
    case 1:
        return slide_cuda_cudnn_bwd(lane->device->attn->cudnn, lane, attn, err);
    case 0:
        return slide_cuda_flash_bwd(lane, attn, err);
    }
    return -1;
}
