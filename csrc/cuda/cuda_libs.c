/* Where NVIDIA's libraries are looked for, and the two tables that the whole backend needs: driver
 * and cuBLASLt. cuDNN's stands in cuda_cudnn.c, for it may be missing.
 * Called by cuda_device.c, cuda_gemm.c and cuda_cudnn.c. */
#define _GNU_SOURCE 1
#include "cuda/cuda_libs.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/env.h"
#include "cuda/cuda.h"

#define PATH_MAX_ 1024
#define CANDIDATES 16

/* Names of the functions once macros such as cuMemAlloc are what they stand for. */
#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

/* The libraries of this process: guarded by lock, each set once. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char folder[PATH_MAX_]; /* of pip's nvidia packages, as the caller says */
    bool looked;            /* in there: another folder comes too late */
    bool driver_ready, cublaslt_ready;
    struct slide_cuda_driver driver;
    struct slide_cublaslt cublaslt;
    char driver_path[PATH_MAX_], cublaslt_path[PATH_MAX_];
} libraries;

void slide_cuda_folder_set(const char *nvidia)
{
    pthread_mutex_lock(&lock);
    if (!libraries.looked && nvidia && strlen(nvidia) < sizeof libraries.folder)
        snprintf(libraries.folder, sizeof libraries.folder, "%s", nvidia);
    pthread_mutex_unlock(&lock);
}

struct search {
    char path[CANDIDATES][PATH_MAX_];
    const char *candidate[CANDIDATES + 1];
    int n;
};

static void add(struct search *s, const char *folder, const char *middle, const char *soname)
{
    if (s->n < CANDIDATES) {
        int n = snprintf(s->path[s->n], PATH_MAX_, "%s%s%s", folder, middle, soname);
        if (n > 0 && n < PATH_MAX_) {
            s->candidate[s->n] = s->path[s->n];
            s->n++;
        }
    }
}

/* pip's folders, below `nvidia` and, beside this library, ../nvidia and ../../nvidia. */
static void add_pip(struct search *s, const char *folders, const char *soname)
{
    Dl_info info;
    char near[2][PATH_MAX_] = {"", ""};
    if (dladdr((void *)slide_cuda_folder_set, &info) && info.dli_fname) {
        const char *slash = strrchr(info.dli_fname, '/');
        int length = slash ? (int)(slash - info.dli_fname) : 0;
        snprintf(near[0], PATH_MAX_, "%.*s/../nvidia", length, info.dli_fname);
        snprintf(near[1], PATH_MAX_, "%.*s/../../nvidia", length, info.dli_fname);
    }
    const char *const root[] = {libraries.folder, near[0], near[1]};
    for (int r = 0; r < 3; r++) {
        char list[256], *rest = list, *one;
        snprintf(list, sizeof list, "%s", folders);
        while (root[r][0] && (one = strsep(&rest, ":"))) {
            char middle[300];
            snprintf(middle, sizeof middle, "/%s/", one);
            add(s, root[r], middle, soname);
        }
    }
}

static void *open_locked(const char *env, const char *folders, const char *soname,
                         const struct slide_dl_symbol *symbols, int count, char *found,
                         size_t found_size, struct slide_err *err)
{
    struct search *s = calloc(1, sizeof *s);
    if (!s) {
        slide_err_set(err, SLIDE_EMEM, "no memory for a search path");
        return NULL;
    }
    const char *named = env ? slide_env_get(env) : "";
    libraries.looked |= *folders != 0;
    if (named[0]) {
        add(s, named, "", ""); /* the only one: another is no help to whoever set it */
    } else {
        /* A library that the process has already is the one: two copies don't share contexts. */
        void *loaded = dlopen(soname, RTLD_NOW | RTLD_NOLOAD);
        if (loaded) {
            dlclose(loaded);
            add(s, soname, "", "");
        }
        if (*folders)
            add_pip(s, folders, soname);
        add(s, soname, "", "");
        const char *home = getenv("CUDA_HOME");
        if (home && *home && *folders)
            add(s, home, "/lib64/", soname);
    }
    void *handle = slide_dl_open(s->candidate, symbols, count, found, found_size, err);
    free(s);
    return handle;
}

void *slide_cuda_lib_open(const char *env, const char *folders, const char *soname,
                          const struct slide_dl_symbol *symbols, int count, char *found,
                          size_t found_size, struct slide_err *err)
{
    pthread_mutex_lock(&lock);
    void *handle = open_locked(env, folders, soname, symbols, count, found, found_size, err);
    pthread_mutex_unlock(&lock);
    return handle;
}

static int open_driver(struct slide_err *err)
{
    struct slide_cuda_driver *d = &libraries.driver;
    const struct slide_dl_symbol symbols[] = {
#define X(name) {TEXT(name), (void **)&d->name},
#include "cuda/driver.def"
#undef X
    };
    if (!open_locked("SLIDE_CUDA_DRIVER", "", "libcuda.so.1", symbols,
                     (int)(sizeof symbols / sizeof *symbols), libraries.driver_path, PATH_MAX_,
                     err))
        return slide_err_note(err, "the CUDA backend needs NVIDIA's driver");
    CUresult result = d->cuInit(0);
    if (result) {
        const char *text = NULL;
        d->cuGetErrorString(result, &text);
        return slide_err_set(err, SLIDE_EDEVICE, "cuInit: %s (error %d); driver: %s",
                             text ? text : "unknown", (int)result, libraries.driver_path);
    }
    return 0;
}

const struct slide_cuda_driver *slide_cuda_driver_get(struct slide_err *err)
{
    pthread_mutex_lock(&lock);
    if (!libraries.driver_ready && !open_driver(err))
        libraries.driver_ready = true;
    bool ready = libraries.driver_ready;
    pthread_mutex_unlock(&lock);
    return ready ? &libraries.driver : NULL;
}

const struct slide_cublaslt *slide_cublaslt_get(struct slide_err *err)
{
    struct slide_cublaslt *c = &libraries.cublaslt;
    const struct slide_dl_symbol symbols[] = {
#define X(name) {TEXT(name), (void **)&c->name},
#include "cuda/cublaslt.def"
#undef X
    };
    pthread_mutex_lock(&lock);
    if (!libraries.cublaslt_ready)
        libraries.cublaslt_ready =
            open_locked("SLIDE_CUBLASLT", "cu13/lib:cublas/lib", "libcublasLt.so.13", symbols,
                        (int)(sizeof symbols / sizeof *symbols), libraries.cublaslt_path, PATH_MAX_,
                        err) != NULL;
    bool ready = libraries.cublaslt_ready;
    pthread_mutex_unlock(&lock);
    if (!ready)
        slide_err_note(err, "the CUDA backend needs cuBLAS 13: pip install 'slidedp[cuda]', or set "
                            "SLIDE_CUBLASLT to the library's path");
    return ready ? c : NULL;
}

const char *slide_cuda_driver_path(void)
{
    return libraries.driver_path;
}

const char *slide_cublaslt_path(void)
{
    return libraries.cublaslt_path;
}
