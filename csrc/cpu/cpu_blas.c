/* The BLAS of the CPU backend, opened once a process. Only sgemm is used, always with one thread of
 * its own: the threads are the device's pool, so they stay within the rank's budget and the cut of
 * the work, and with it every bit, does not depend on their number. */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/dl.h"
#include "base/env.h"
#include "cpu/cpu_inside.h"

/* The driver of this backend: guarded by lock, set once. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    void *handle;
    slide_cpu_sgemm_fn *sgemm;
    void (*set_threads)(int);
    char *(*config)(void);
    char *(*core)(void);
    char found[512];
} blas;

/* Paths beside this library: where pip puts scipy_openblas32 when it puts us into slidedp/. */
static void beside(const char *up, char *path, size_t size)
{
    Dl_info info;
    path[0] = 0;
    if (!dladdr((void *)slide_cpu_sgemm_get, &info) || !info.dli_fname)
        return;
    const char *slash = strrchr(info.dli_fname, '/');
    int folder = slash ? (int)(slash - info.dli_fname) : 0;
    snprintf(path, size, "%.*s%sscipy_openblas32/lib/libscipy_openblas.so", folder, info.dli_fname,
             up);
}

static int open_blas(const char *path, struct slide_err *err)
{
    char near[512], far[512];
    const char *candidates[8];
    const char *env = slide_env_get("SLIDE_BLAS");
    int n = 0;
    beside("/../", near, sizeof near);
    beside("/../../", far, sizeof far);
    const char *const all[] = {path, near, far, "libopenblas.so.0", "libblas.so.3"};
    /* What the environment names is the only candidate: another library is no help to whoever set
     * it. `path` is the caller's guess, and the first of several. */
    if (env[0])
        candidates[n++] = env;
    else
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            if (all[i] && all[i][0])
                candidates[n++] = all[i];
    candidates[n] = NULL;
    const struct slide_dl_symbol scipy[] = {
        {"scipy_cblas_sgemm", (void **)&blas.sgemm},
        {"scipy_openblas_set_num_threads", (void **)&blas.set_threads},
        {"scipy_openblas_get_config", (void **)&blas.config},
        {"scipy_openblas_get_corename", (void **)&blas.core},
    };
    const struct slide_dl_symbol plain[] = {
        {"cblas_sgemm", (void **)&blas.sgemm},
        {"openblas_set_num_threads", (void **)&blas.set_threads},
        {"openblas_get_config", (void **)&blas.config},
        {"openblas_get_corename", (void **)&blas.core},
    };
    struct slide_err first = SLIDE_ERR_INIT;
    blas.handle = slide_dl_open(candidates, scipy, 4, blas.found, sizeof blas.found, &first);
    if (!blas.handle)
        blas.handle = slide_dl_open(candidates, plain, 4, blas.found, sizeof blas.found, err);
    if (!blas.handle)
        return slide_err_note(err, "the CPU backend needs OpenBLAS: pip install scipy-openblas32, "
                                   "or set SLIDE_BLAS to the library's path");
    blas.set_threads(1);
    return 0;
}

slide_cpu_sgemm_fn *slide_cpu_sgemm_get(const char *path, struct slide_err *err)
{
    pthread_mutex_lock(&lock);
    slide_cpu_sgemm_fn *sgemm = blas.handle || !open_blas(path, err) ? blas.sgemm : NULL;
    pthread_mutex_unlock(&lock);
    return sgemm;
}

int slide_cpu_blas(const char *path, char *text, size_t size, struct slide_err *err)
{
    if (!slide_cpu_sgemm_get(path, err))
        return -1;
    snprintf(text, size, "%.60s, %s, from %s", blas.config(), blas.core(), blas.found);
    return 0;
}
