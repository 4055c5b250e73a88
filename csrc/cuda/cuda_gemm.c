/* GEMM through cuBLASLt. It counts columns first and we count rows first: out = op(a) op(b) there
 * is out' = op(b)' op(a)', so operands change places and keep their transposes. A shape's
 * descriptors and algorithm are made at its first use and kept: later calls allocate nothing.
 *
 * The algorithm is the heuristic's first unless another of its first few is clearly faster, which
 * is measured once a shape, at its first use if the output isn't an input as well; a product that
 * is added to something has the algorithm of the one that isn't. What was chosen is written to the
 * cache folder, so that the next run, too, has the same algorithm and the same bits. Sums split
 * over k are joined in a fixed order: in-place reduction is masked out. FP32 products are FP32,
 * never TF32. Called through the device's table. */
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "cuda/cuda_cache.h"
#include "cuda/cuda_inside.h"

#define WORKSPACE (32u << 20) /* what the vendor recommends for Hopper */
#define SHAPES 1024u          /* a power of two; a model has a few dozen */
#define CANDIDATES 8
#define ROUNDS 3
#define CLEARLY 0.98f /* of the heuristic's time */

/* What decides about descriptors and algorithm. No padding: compared and hashed as bytes. */
struct key {
    int64_t lda, ldb, ldo;
    int32_t m, n, k;
    int32_t trans_a, trans_b, in_type, out_type;
    int32_t add, bias;
    int32_t align; /* lowest set bit of all addresses, at most 16 */
};

struct shape {
    struct key key;
    bool used;
    cublasLtMatmulDesc_t matmul;
    cublasLtMatrixLayout_t a, b, out;
    cublasLtMatmulAlgo_t algo;
};

struct slide_cuda_gemm {
    const struct slide_cublaslt *lt;
    cublasLtHandle_t handle;
    CUevent begin, end;
    char cache[SLIDE_CUDA_CACHE_NAME];
    struct shape shape[SHAPES];
};

static int check(struct slide_cuda_gemm *g, cublasStatus_t status, const char *what,
                 struct slide_err *err)
{
    if (!status)
        return 0;
    return slide_err_set(err, status == CUBLAS_STATUS_ALLOC_FAILED ? SLIDE_EMEM : SLIDE_EDEVICE,
                         "%s: %s", what, g->lt->cublasLtGetStatusString(status));
}

#define LT(g, function, ...) check(g, (g)->lt->function(__VA_ARGS__), #function, err)

static cudaDataType_t type_of(enum slide_dtype dtype)
{
    return dtype == SLIDE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

static int32_t alignment(const struct slide_gemm *g)
{
    uintptr_t all = (uintptr_t)g->a | (uintptr_t)g->b | (uintptr_t)g->out | (uintptr_t)g->add |
                    (uintptr_t)g->bias | 16;
    return (int32_t)(all & -all);
}

static struct key key_of(const struct slide_gemm *g)
{
    return (struct key){g->lda,
                        g->ldb,
                        g->ldo,
                        g->m,
                        g->n,
                        g->k,
                        g->trans_a,
                        g->trans_b,
                        (int32_t)g->in_type,
                        (int32_t)g->out_type,
                        g->add != NULL,
                        g->bias != NULL,
                        alignment(g)};
}

static uint64_t hash_of(const struct key *key)
{
    const unsigned char *bytes = (const unsigned char *)key;
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    return hash;
}

/* The shape's place: its own, or the free one that it may have; NULL when the table is full. */
static struct shape *find(struct slide_cuda_gemm *g, const struct key *key)
{
    uint64_t at = hash_of(key);
    for (unsigned i = 0; i < SHAPES; i++) {
        struct shape *s = &g->shape[(at + i) % SHAPES];
        if (!s->used || !memcmp(&s->key, key, sizeof *key))
            return s;
    }
    return NULL;
}

/* ---- a new shape ---- */

static void drop(struct slide_cuda_gemm *g, struct shape *s)
{
    if (s->matmul)
        g->lt->cublasLtMatmulDescDestroy(s->matmul);
    if (s->a)
        g->lt->cublasLtMatrixLayoutDestroy(s->a);
    if (s->b)
        g->lt->cublasLtMatrixLayoutDestroy(s->b);
    if (s->out)
        g->lt->cublasLtMatrixLayoutDestroy(s->out);
    *s = (struct shape){0};
}

/* A row-major [rows, cols] matrix is a column-major [cols, rows] one. */
static int layout(struct slide_cuda_gemm *g, cublasLtMatrixLayout_t *out, enum slide_dtype type,
                  int32_t rows, int32_t cols, int64_t ld, struct slide_err *err)
{
    return LT(g, cublasLtMatrixLayoutCreate, out, type_of(type), (uint64_t)cols, (uint64_t)rows,
              ld);
}

static int describe(struct slide_cuda_gemm *g, struct shape *s, const struct slide_gemm *a,
                    struct slide_err *err)
{
    cublasOperation_t first = a->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t second = a->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    cudaDataType_t bias = type_of(a->in_type);
    if (LT(g, cublasLtMatmulDescCreate, &s->matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F) ||
        LT(g, cublasLtMatmulDescSetAttribute, s->matmul, CUBLASLT_MATMUL_DESC_TRANSA, &first,
           sizeof first) ||
        LT(g, cublasLtMatmulDescSetAttribute, s->matmul, CUBLASLT_MATMUL_DESC_TRANSB, &second,
           sizeof second))
        return -1;
    if (a->bias && (LT(g, cublasLtMatmulDescSetAttribute, s->matmul, CUBLASLT_MATMUL_DESC_EPILOGUE,
                       &epilogue, sizeof epilogue) ||
                    LT(g, cublasLtMatmulDescSetAttribute, s->matmul,
                       CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &bias, sizeof bias)))
        return -1;
    int32_t b_rows = a->trans_b ? a->n : a->k, b_cols = a->trans_b ? a->k : a->n;
    int32_t a_rows = a->trans_a ? a->k : a->m, a_cols = a->trans_a ? a->m : a->k;
    return layout(g, &s->a, a->in_type, b_rows, b_cols, a->ldb, err) ||
                   layout(g, &s->b, a->in_type, a_rows, a_cols, a->lda, err) ||
                   layout(g, &s->out, a->out_type, a->m, a->n, a->ldo, err)
               ? -1
               : 0;
}

static int run(struct slide_lane *lane, const struct shape *s, const cublasLtMatmulAlgo_t *algo,
               const struct slide_gemm *a, struct slide_err *err)
{
    struct slide_cuda_gemm *g = lane->device->gemm;
    float one = 1, beta = a->add ? 1.0f : 0.0f;
    const void *add = a->add ? a->add : a->out;
    /* The bias is part of the descriptor, and another one in each layer. */
    if (a->bias && LT(g, cublasLtMatmulDescSetAttribute, s->matmul,
                      CUBLASLT_MATMUL_DESC_BIAS_POINTER, &a->bias, sizeof a->bias))
        return -1;
    return LT(g, cublasLtMatmul, g->handle, s->matmul, &one, a->b, s->a, a->a, s->b, &beta, add,
              s->out, a->out, s->out, algo, a->workspace, a->workspace_bytes,
              (cudaStream_t)lane->stream);
}

/* ---- the choice ---- */

static int heuristics(struct slide_cuda_gemm *g, const struct shape *s, const struct slide_gemm *a,
                      cublasLtMatmulHeuristicResult_t *result, int *found, struct slide_err *err)
{
    cublasLtMatmulPreference_t preference = NULL;
    uint64_t workspace = a->workspace_bytes;
    uint32_t align = (uint32_t)s->key.align;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const cublasLtMatmulPreferenceAttributes_t aligned[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    if (LT(g, cublasLtMatmulPreferenceCreate, &preference))
        return -1;
    int failed = LT(g, cublasLtMatmulPreferenceSetAttribute, preference,
                    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace) ||
                 LT(g, cublasLtMatmulPreferenceSetAttribute, preference,
                    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes);
    for (int i = 0; i < 4 && !failed; i++)
        failed = LT(g, cublasLtMatmulPreferenceSetAttribute, preference, aligned[i], &align,
                    sizeof align);
    if (!failed)
        failed = LT(g, cublasLtMatmulAlgoGetHeuristic, g->handle, s->matmul, s->a, s->b, s->out,
                    s->out, preference, CANDIDATES, result, found);
    g->lt->cublasLtMatmulPreferenceDestroy(preference);
    return failed ? -1 : 0;
}

/* Milliseconds of ROUNDS runs; < 0: it doesn't run. */
static float time_of(struct slide_lane *lane, const struct shape *s,
                     const cublasLtMatmulAlgo_t *algo, const struct slide_gemm *a)
{
    struct slide_device *device = lane->device;
    const struct slide_cuda_driver *driver = device->driver;
    float ms = -1;
    if (run(lane, s, algo, a, NULL) || driver->cuEventRecord(device->gemm->begin, lane->stream))
        return -1;
    for (int i = 0; i < ROUNDS; i++)
        if (run(lane, s, algo, a, NULL))
            return -1;
    if (driver->cuEventRecord(device->gemm->end, lane->stream))
        return -1;
    CUresult result;
    while ((result = driver->cuEventQuery(device->gemm->end)) == CUDA_ERROR_NOT_READY)
        ;
    return result || driver->cuEventElapsedTime(&ms, device->gemm->begin, device->gemm->end) ? -1
                                                                                             : ms;
}

/* Whether the product may be formed again without changing the result. */
static bool repeatable(const struct slide_gemm *a)
{
    return a->out != a->add && a->out != a->a && a->out != a->b;
}

static void tune(struct slide_lane *lane, struct shape *s, const struct slide_gemm *a,
                 const cublasLtMatmulHeuristicResult_t *result, int found)
{
    float best = time_of(lane, s, &result[0].algo, a) * CLEARLY;
    for (int i = 1; i < found && best > 0; i++) {
        if (result[i].state || result[i].workspaceSize > a->workspace_bytes)
            continue;
        float ms = time_of(lane, s, &result[i].algo, a);
        if (ms > 0 && ms < best) {
            best = ms;
            s->algo = result[i].algo;
        }
    }
}

static int choose(struct slide_lane *lane, struct shape *s, const struct slide_gemm *a,
                  struct slide_err *err)
{
    struct slide_cuda_gemm *g = lane->device->gemm;
    cublasLtMatmulHeuristicResult_t result[CANDIDATES];
    struct key plain = s->key;
    int found = 0;
    plain.add = 0;
    const struct shape *sibling = find(g, &plain);
    if (sibling && sibling->used) {
        s->algo = sibling->algo;
        return 0;
    }
    if (!slide_cuda_cache_get(g->cache, &plain, sizeof plain, &s->algo, sizeof s->algo))
        return 0;
    if (heuristics(g, s, a, result, &found, err))
        return -1;
    if (!found)
        return slide_err_set(err, SLIDE_EDEVICE, "cuBLASLt has no algorithm for this product");
    s->algo = result[0].algo;
    if (found > 1 && repeatable(a))
        tune(lane, s, a, result, found);
    slide_cuda_cache_put(g->cache, &plain, sizeof plain, &s->algo, sizeof s->algo);
    return 0;
}

/* ---- interface ---- */

int slide_cuda_gemm(struct slide_lane *lane, const struct slide_gemm *a, struct slide_err *err)
{
    struct slide_device *device = lane->device;
    struct slide_cuda_gemm *g = device->gemm;
    if (a->m < 1 || a->n < 1)
        return 0;
    if (a->k < 1)
        return slide_err_set(err, SLIDE_EINVAL, "a product over %d elements", a->k);
    if (slide_cuda_check(device, device->driver->cuCtxSetCurrent(device->context),
                         "cuCtxSetCurrent", err))
        return -1;
    struct key key = key_of(a);
    struct shape *s = find(g, &key);
    if (!s)
        return slide_err_set(err, SLIDE_ESTATE, "more than %u shapes of products", SHAPES);
    if (!s->used) {
        s->key = key;
        if (describe(g, s, a, err) || choose(lane, s, a, err)) {
            drop(g, s);
            return -1;
        }
        s->used = true;
    }
    return run(lane, s, &s->algo, a, err);
}

size_t slide_cuda_gemm_workspace(struct slide_device *device)
{
    (void)device;
    return WORKSPACE;
}

int slide_cuda_gemm_open(struct slide_device *device, struct slide_err *err)
{
    const struct slide_cublaslt *lt = slide_cublaslt_get(err);
    struct slide_cuda_gemm *g = lt ? slide_mem_new(sizeof *g, err) : NULL;
    device->gemm = g;
    if (!g)
        return -1;
    g->lt = lt;
    char gpu[128] = "";
    device->driver->cuDeviceGetName(gpu, sizeof gpu, device->device);
    snprintf(g->cache, sizeof g->cache, "gemm-%s-%zu", gpu, lt->cublasLtGetVersion());
    if (slide_cuda_check(device, device->driver->cuEventCreate(&g->begin, CU_EVENT_DEFAULT),
                         "cuEventCreate", err) ||
        slide_cuda_check(device, device->driver->cuEventCreate(&g->end, CU_EVENT_DEFAULT),
                         "cuEventCreate", err))
        return -1;
    return LT(g, cublasLtCreate, &g->handle);
}

void slide_cuda_gemm_close(struct slide_device *device)
{
    struct slide_cuda_gemm *g = device->gemm;
    if (!g || device->driver->cuCtxSetCurrent(device->context))
        return;
    for (unsigned i = 0; i < SHAPES; i++)
        if (g->shape[i].used)
            drop(g, &g->shape[i]);
    if (g->handle)
        g->lt->cublasLtDestroy(g->handle);
    if (g->begin)
        device->driver->cuEventDestroy(g->begin);
    if (g->end)
        device->driver->cuEventDestroy(g->end);
    slide_mem_free(g);
    device->gemm = NULL;
}
