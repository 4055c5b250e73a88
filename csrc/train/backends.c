/* The one place that names backends: a new one is an include and an entry of the list, and nobody
 * else knows. train.c opens the device through it, py_env.c lists what there is. */
#include <string.h>

#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "train/train.h"

static const struct slide_backend *const backends[] = {&slide_cpu_backend, &slide_cuda_backend,
                                                       NULL};

const struct slide_backend *const *slide_backend_list(void)
{
    return backends;
}

const struct slide_backend *slide_backend_find(const char *name, struct slide_err *err)
{
    for (int i = 0; backends[i]; i++)
        if (!strcmp(backends[i]->name, name))
            return backends[i];
    slide_err_set(err, SLIDE_EINVAL, "device '%s' is unknown; there are: cpu, cuda", name);
    return NULL;
}

int slide_backend_text(const char *name, const char *blas, const char *nvidia, char *text,
                       size_t size, struct slide_err *err)
{
    const struct slide_backend *backend = slide_backend_find(name, err);
    if (!backend)
        return -1;
    return backend == &slide_cuda_backend ? slide_cuda_text(nvidia, text, size, err)
                                          : slide_cpu_blas(blas, text, size, err);
}
