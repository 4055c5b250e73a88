/* cuDNN's library and its plans. Making a plan compiles a kernel, so a plan is kept on disk as what
 * cuDNN calls its JSON representation, the machine code included: a file a shape, named by the
 * version of cuDNN, the GPU and the shape, with a checksum in front. A file that isn't whole, or
 * that cuDNN doesn't take, is replaced.
 * Called by cuda_cudnn.c. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "cuda/cuda_cache.h"
#include "cuda/cuda_libs.h"
#include "cuda/cudnn_graph.h"

#define PATH_SIZE 1024
#define FILE_MAX (64 << 20)
/* Counts up when the graphs change: plans of older ones are not for these. */
#define GRAPHS 1

/* ---- the library ---- */

/* NVRTC compiles cuDNN's engines, and looks for its builtins by name: not found in pip's folders
 * unless they are in the process already. So both are opened here, by path; cuDNN finds them, for
 * the loader knows them by their names from then on. */
static int open_nvrtc(struct slide_err *err)
{
    int (*version)(int *, int *) = NULL, major = 0, minor = 0;
    char name[64], path[PATH_SIZE];
    const struct slide_dl_symbol symbols[] = {{"nvrtcVersion", (void **)&version}};
    if (!slide_cuda_lib_open(NULL, "cu13/lib:cuda_nvrtc/lib", "libnvrtc.so.13", symbols, 1, path,
                             sizeof path, err))
        return slide_err_note(err, "cuDNN needs NVRTC: pip install nvidia-cuda-nvrtc");
    if (version(&major, &minor))
        return slide_err_set(err, SLIDE_EDEVICE, "nvrtcVersion failed (%s)", path);
    snprintf(name, sizeof name, "libnvrtc-builtins.so.%d.%d", major, minor);
    if (!slide_cuda_lib_open(NULL, "cu13/lib:cuda_nvrtc/lib", name, NULL, 0, path, sizeof path,
                             err))
        return slide_err_note(err, "cuDNN needs NVRTC's builtins: pip install nvidia-cuda-nvrtc");
    return 0;
}

int slide_cudnn_open(struct slide_cudnn *api, struct slide_err *err)
{
    const struct slide_dl_symbol symbols[] = {
#define X(name) {#name, (void **)&api->name},
#include "cuda/cudnn.def"
#undef X
    };
    char path[PATH_SIZE];
    /* First: cuDNN aborts the process where it finds no cuBLASLt. */
    if (!slide_cublaslt_get(err) || open_nvrtc(err))
        return -1;
    if (!slide_cuda_lib_open("SLIDE_CUDNN", "cudnn/lib", "libcudnn.so.9", symbols,
                             (int)(sizeof symbols / sizeof *symbols), path, sizeof path, err))
        return slide_err_note(err, "attention at full speed needs cuDNN 9: pip install "
                                   "'slidedp[cuda]', or set SLIDE_CUDNN to the library's path");
    return 0;
}

/* ---- making a plan ---- */

#define CUDNN(p, function, ...)                                                                    \
    slide_cudnn_check(&(p)->target->api, (p)->target->api.function(__VA_ARGS__), #function, err)

static int set_target(const struct slide_cudnn_plan *p, cudnnBackendDescriptor_t d,
                      struct slide_err *err)
{
    const struct slide_cudnn_target *t = p->target;
    if (t->handle)
        return CUDNN(p, cudnnBackendSetAttribute, d, CUDNN_ATTR_EXECUTION_PLAN_HANDLE,
                     CUDNN_TYPE_HANDLE, 1, &t->handle);
    return CUDNN(p, cudnnBackendSetAttribute, d, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP,
                 CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &t->device_prop);
}

/* The end of both ways to a plan. */
static int finalize(struct slide_cudnn_plan *p, struct slide_err *err)
{
    int64_t bytes = 0, count = 0;
    if (CUDNN(p, cudnnBackendFinalize, p->plan) ||
        CUDNN(p, cudnnBackendGetAttribute, p->plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
              CUDNN_TYPE_INT64, 1, &count, &bytes))
        return -1;
    if (count != 1 || bytes < 0)
        return slide_err_set(err, SLIDE_EDEVICE, "cuDNN gives no workspace size");
    p->workspace = (size_t)bytes;
    return 0;
}

/* Why no engine took a graph: the first reason of the list that cuDNN leaves behind. */
static const char *reason(const struct slide_cudnn *api, char *last, size_t size)
{
    last[0] = 0;
    api->cudnnGetLastErrorString(last, size);
    char *first = strstr(last, "Reason: ");
    first = first ? first + strlen("Reason: ") : last;
    first[strcspn(first, "\n")] = 0;
    return *first ? first : "no reason given";
}

/* The first of the heuristics' engines; they have been checked for support. */
static int choose(struct slide_cudnn_plan *p, cudnnBackendDescriptor_t graph,
                  cudnnBackendDescriptor_t heuristics, cudnnBackendDescriptor_t config,
                  cudnnBackendDescriptor_t engine, struct slide_err *err)
{
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    const struct slide_cudnn_target *t = p->target;
    char last[1024];
    int64_t count = 0;
    if (CUDNN(p, cudnnBackendSetAttribute, heuristics, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH,
              CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph) ||
        CUDNN(p, cudnnBackendSetAttribute, heuristics, CUDNN_ATTR_ENGINEHEUR_MODE,
              CUDNN_TYPE_HEUR_MODE, 1, &mode) ||
        (!t->handle &&
         CUDNN(p, cudnnBackendSetAttribute, heuristics, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP,
               CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &t->device_prop)) ||
        CUDNN(p, cudnnBackendFinalize, heuristics) ||
        CUDNN(p, cudnnBackendGetAttribute, heuristics, CUDNN_ATTR_ENGINEHEUR_RESULTS,
              CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &config))
        return -1;
    if (count < 1)
        return slide_err_set(err, SLIDE_EDEVICE, "cuDNN has no engine for it: %s",
                             reason(&t->api, last, sizeof last));
    if (CUDNN(p, cudnnBackendGetAttribute, config, CUDNN_ATTR_ENGINECFG_ENGINE,
              CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &engine) ||
        CUDNN(p, cudnnBackendGetAttribute, engine, CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64,
              1, &count, &p->engine) ||
        CUDNN(p, cudnnBackendSetAttribute, p->plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
              CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &config))
        return -1;
    return 0;
}

static int build(struct slide_cudnn_plan *p, struct slide_err *err)
{
    static const cudnnBackendDescriptorType_t type[] = {CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
                                                        CUDNN_BACKEND_ENGINECFG_DESCRIPTOR,
                                                        CUDNN_BACKEND_ENGINE_DESCRIPTOR};
    cudnnBackendDescriptor_t d[3] = {NULL, NULL, NULL};
    int result = -1;
    struct slide_cudnn_graph *graph = slide_mem_new(sizeof *graph, err);
    if (!graph || slide_cudnn_graph_init(graph, p->target, &p->shape, err))
        goto out;
    for (int i = 0, n = 0; i < SLIDE_CUDNN_IDS; i++) {
        bool given = n < p->ids && p->id[n] == i;
        if (given != graph->has[i]) {
            slide_err_set(err, SLIDE_ESTATE, "tensor %d of the graph", i);
            goto out;
        }
        n += given;
    }
    for (int i = 0; i < 3; i++)
        if (CUDNN(p, cudnnBackendCreateDescriptor, type[i], &d[i]))
            goto out;
    if (CUDNN(p, cudnnBackendCreateDescriptor, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, &p->plan) ||
        set_target(p, p->plan, err) || choose(p, graph->graph, d[0], d[1], d[2], err) ||
        finalize(p, err))
        goto out;
    result = 0;
out:
    for (int i = 2; i >= 0; i--)
        if (d[i])
            p->target->api.cudnnBackendDestroyDescriptor(d[i]);
    if (graph)
        slide_cudnn_graph_fini(graph);
    slide_mem_free(graph);
    return result;
}

static void drop(struct slide_cudnn_plan *p)
{
    if (p->plan)
        p->target->api.cudnnBackendDestroyDescriptor(p->plan);
    p->plan = NULL;
}

/* ---- on disk ---- */

static uint64_t checksum(const char *text, size_t size)
{
    uint64_t sum = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < size; i++)
        sum = (sum ^ (unsigned char)text[i]) * 1099511628211u;
    return sum;
}

int slide_cudnn_plan_path(const struct slide_cudnn_plan *p, char *path, size_t size)
{
    const struct slide_cudnn_shape *s = &p->shape;
    char name[SLIDE_CUDA_CACHE_NAME];
    if (!*p->target->gpu)
        return -1;
    int n =
        snprintf(name, sizeof name, "cudnn-%zu-%s-%d-%s-%dx%d-%d-%d-%d-%d-%lld-%lld-%lld-%lld-%lld",
                 p->target->api.cudnnGetVersion(), p->target->gpu, GRAPHS,
                 s->backward ? "bwd" : "fwd", s->rows, s->seq, s->heads, s->kv_heads, s->head_dim,
                 s->window, (long long)s->q_stride, (long long)s->kv_stride, (long long)s->o_stride,
                 (long long)s->dq_stride, (long long)s->dkv_stride);
    return n < 0 || n >= (int)sizeof name ? -1 : slide_cuda_cache_path(name, path, size);
}

/* The text of a whole file, or NULL; `size` with the 0 at its end. */
static char *read_file(const char *path, size_t *size)
{
    unsigned long long bytes, sum;
    char *text = NULL;
    bool whole = false;
    FILE *file = fopen(path, "re");
    if (!file)
        return NULL;
    if (fscanf(file, "slidedp %llu %llx", &bytes, &sum) == 2 && fgetc(file) == '\n' &&
        bytes < FILE_MAX)
        text = slide_mem_new((size_t)bytes + 1, NULL);
    if (text) {
        whole = fread(text, 1, (size_t)bytes, file) == bytes && fgetc(file) == EOF &&
                checksum(text, (size_t)bytes) == sum;
        *size = (size_t)bytes + 1;
    }
    fclose(file);
    if (!whole) {
        slide_mem_free(text);
        return NULL;
    }
    return text;
}

static int load(struct slide_cudnn_plan *p, const char *path)
{
    struct slide_err *err = NULL;
    size_t size = 0;
    int result = -1;
    char *text = read_file(path, &size);
    if (text &&
        !CUDNN(p, cudnnBackendCreateDescriptor, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
               &p->plan) &&
        !set_target(p, p->plan, err) &&
        !CUDNN(p, cudnnBackendSetAttribute, p->plan, CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION,
               CUDNN_TYPE_CHAR, (int64_t)size, text))
        result = finalize(p, err);
    slide_mem_free(text);
    if (result)
        drop(p);
    return result;
}

/* Written beside it and renamed, so that nobody reads half a file. What fails here costs the next
 * process a tenth of a second and nothing else. */
static void save(const struct slide_cudnn_plan *p, const char *path)
{
    struct slide_err *err = NULL;
    char beside[PATH_SIZE + 32], *text = NULL;
    int64_t size = 0;
    if (CUDNN(p, cudnnBackendGetAttribute, p->plan, CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION,
              CUDNN_TYPE_CHAR, 0, &size, NULL) ||
        size < 1 || size > FILE_MAX)
        return;
    text = slide_mem_new((size_t)size + 1, NULL);
    if (!text ||
        CUDNN(p, cudnnBackendGetAttribute, p->plan, CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION,
              CUDNN_TYPE_CHAR, size, &size, text)) {
        slide_mem_free(text);
        return;
    }
    size_t bytes = strlen(text);
    snprintf(beside, sizeof beside, "%s.%ld.XXXXXX", path, (long)getpid());
    int fd = mkstemp(beside);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "w");
    if (file) {
        int failed = fprintf(file, "slidedp %zu %llx\n", bytes,
                             (unsigned long long)checksum(text, bytes)) < 0 ||
                     fwrite(text, 1, bytes, file) != bytes;
        failed = fclose(file) || failed;
        if (failed || rename(beside, path))
            unlink(beside);
    } else if (fd >= 0) {
        close(fd);
        unlink(beside);
    }
    slide_mem_free(text);
}

/* ---- plans ---- */

struct slide_cudnn_plan *slide_cudnn_plan_new(const struct slide_cudnn_target *target,
                                              const struct slide_cudnn_shape *shape,
                                              struct slide_err *err)
{
    char path[PATH_SIZE];
    struct slide_cudnn_plan *p = slide_mem_new(sizeof *p, err);
    if (!p)
        return NULL;
    p->shape = *shape;
    p->target = target;
    p->engine = -1;
    p->why = SLIDE_ERR_INIT;
    p->ids = slide_cudnn_graph_ids(shape, p->id);
    bool kept = !slide_cudnn_plan_path(p, path, sizeof path);
    if (kept && !load(p, path))
        return p;
    if (!build(p, &p->why)) {
        if (kept)
            save(p, path);
        return p;
    }
    drop(p);
    p->refused = true;
    if (p->why.code == SLIDE_EMEM) { /* says nothing about the shape */
        if (err)
            *err = p->why;
        slide_mem_free(p);
        return NULL;
    }
    return p;
}

void slide_cudnn_plan_free(struct slide_cudnn_plan *plan)
{
    if (plan)
        drop(plan);
    slide_mem_free(plan);
}

int slide_cudnn_plan_run(const struct slide_cudnn_plan *plan, void *const *pointer, void *workspace,
                         cudaStream_t stream, struct slide_err *err)
{
    void *given[SLIDE_CUDNN_IDS];
    cudnnBackendDescriptor_t pack = NULL;
    int result = -1;
    for (int i = 0; i < plan->ids; i++)
        given[i] = pointer[plan->id[i]];
    /* Host memory alone, and no way around it: a finalised pack can't be filled again. */
    if (!CUDNN(plan, cudnnSetStream, plan->target->handle, stream) &&
        !CUDNN(plan, cudnnBackendCreateDescriptor, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack) &&
        !CUDNN(plan, cudnnBackendSetAttribute, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS,
               CUDNN_TYPE_INT64, plan->ids, plan->id) &&
        !CUDNN(plan, cudnnBackendSetAttribute, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS,
               CUDNN_TYPE_VOID_PTR, plan->ids, given) &&
        !CUDNN(plan, cudnnBackendSetAttribute, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
               CUDNN_TYPE_VOID_PTR, 1, &workspace) &&
        !CUDNN(plan, cudnnBackendFinalize, pack) &&
        !CUDNN(plan, cudnnBackendExecute, plan->target->handle, plan->plan, pack))
        result = 0;
    if (pack)
        plan->target->api.cudnnBackendDestroyDescriptor(pack);
    return result;
}
