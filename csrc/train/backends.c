/* The one place that names backends: a new one is an include and an entry of the list, and nobody
 * else knows. train.c opens the device through it, py_env.c lists what there is. */
#include <string.h>

#include "cpu/cpu.h"
#include "train/train.h"

static const struct slide_backend *const backends[] = {&slide_cpu_backend, NULL};

const struct slide_backend *const *slide_backend_list(void)
{
    return backends;
}

const struct slide_backend *slide_backend_find(const char *name, struct slide_err *err)
{
    for (int i = 0; backends[i]; i++)
        if (!strcmp(backends[i]->name, name))
            return backends[i];
    slide_err_set(err, SLIDE_EINVAL, "device '%s' is not built into this version; there is: cpu",
                  name);
    return NULL;
}

int slide_backend_text(const char *name, const char *blas, char *text, size_t size,
                       struct slide_err *err)
{
    if (!slide_backend_find(name, err))
        return -1;
    return slide_cpu_blas(blas, text, size, err);
}
