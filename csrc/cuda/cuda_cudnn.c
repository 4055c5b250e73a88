/* Attention through cuDNN: which plan is for a call, and how a call is cut into several.
 *
 * The deterministic backward wants scratch in the order of heads * seq^2, so it is split until that
 * fits a limit, or the workspace that there is: by rows first; a single row by its KV heads, each
 * with its query heads (never below one, whatever the limit). No bit depends on the split. Stats
 * are packed [rows, heads, seq] within a call, so heads are split at one row only.
 *
 * Packed documents are not for these graphs: a mask that is anything but causal, or causal within
 * one window, is refused. Called by cuda_attn.c. Plans and refusals are kept by shape: a question
 * that was asked before is a look into a table. One caller at a time a device. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "cuda/cuda_inside.h"
#include "cuda/cudnn_graph.h"

#define LIMIT ((size_t)512 << 20)
#define PLANS 1024u /* a power of two; of the table, three quarters are used at most */
#define SEQ_MAX (1 << 20)
#define ALIGN 256u

struct slide_cuda_cudnn {
    struct slide_device *device;
    struct slide_cudnn_target target;
    size_t limit;
    unsigned plans;
    struct slide_cudnn_plan *plan[PLANS];
};

/* How a backward is cut: calls of `rows` rows and `kv_heads` KV heads, the last rows by `rest`. */
struct split {
    int32_t rows, kv_heads;
    const struct slide_cudnn_plan *main, *rest; /* rest NULL: nothing is left over */
    size_t bytes;                               /* of workspace */
};

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* ---- open, close ---- */

static int enter(struct slide_device *device, struct slide_err *err)
{
    return slide_cuda_check(device, device->driver->cuCtxSetCurrent(device->context),
                            "cuCtxSetCurrent", err);
}

/* Takes the target over. Apart from `open` because of the offline test. */
static struct slide_cuda_cudnn *start(struct slide_device *device,
                                      const struct slide_cudnn_target *target,
                                      struct slide_err *err)
{
    struct slide_cuda_cudnn *c = slide_mem_new(sizeof *c, err);
    if (!c)
        return NULL;
    c->device = device;
    c->target = *target;
    c->limit = LIMIT;
    return c;
}

struct slide_cuda_cudnn *slide_cuda_cudnn_open(struct slide_device *device, struct slide_err *err)
{
    struct slide_cuda_cudnn *c = NULL;
    struct slide_cudnn_target target;
    memset(&target, 0, sizeof target);
    if (device->capability < 80) {
        slide_err_set(err, SLIDE_EDEVICE,
                      "cuDNN's attention in BF16 needs a GPU of compute capability 8.0, this is "
                      "%d.%d",
                      device->capability / 10, device->capability % 10);
        return NULL;
    }
    if (slide_cudnn_open(&target.api, err) || enter(device, err) ||
        slide_cudnn_check(&target.api, target.api.cudnnCreate(&target.handle), "cudnnCreate", err))
        return NULL;
    if (device->driver->cuDeviceGetName(target.gpu, (int)sizeof target.gpu, device->device))
        target.gpu[0] = 0;
    c = start(device, &target, err);
    if (!c)
        target.api.cudnnDestroy(target.handle);
    return c;
}

void slide_cuda_cudnn_close(struct slide_cuda_cudnn *cudnn)
{
    if (!cudnn)
        return;
    enter(cudnn->device, NULL);
    for (unsigned i = 0; i < PLANS; i++)
        slide_cudnn_plan_free(cudnn->plan[i]);
    if (cudnn->target.device_prop)
        cudnn->target.api.cudnnBackendDestroyDescriptor(cudnn->target.device_prop);
    if (cudnn->target.handle)
        cudnn->target.api.cudnnDestroy(cudnn->target.handle);
    slide_mem_free(cudnn);
}

/* ---- plans ---- */

/* The plan of a shape, made at the first question. NULL: refused, or none could be made. */
static const struct slide_cudnn_plan *plan_of(struct slide_cuda_cudnn *c,
                                              const struct slide_cudnn_shape *shape,
                                              struct slide_err *err)
{
    uint32_t hash = 2166136261u;
    for (size_t i = 0; i < sizeof *shape; i++)
        hash = (hash ^ ((const unsigned char *)shape)[i]) * 16777619u;
    unsigned i = (hash ^ hash >> 16) & (PLANS - 1);
    while (c->plan[i] && memcmp(&c->plan[i]->shape, shape, sizeof *shape))
        i = (i + 1) & (PLANS - 1);
    if (!c->plan[i]) {
        if (c->plans >= PLANS / 4 * 3) {
            slide_err_set(err, SLIDE_ESTATE, "attention of more than %u shapes", PLANS / 4 * 3);
            return NULL;
        }
        c->plan[i] = enter(c->device, err) ? NULL : slide_cudnn_plan_new(&c->target, shape, err);
        if (!c->plan[i])
            return NULL;
        c->plans++;
    }
    if (c->plan[i]->refused) {
        slide_err_set(err, c->plan[i]->why.code,
                      "cuDNN refuses %s of %d x %d tokens, %d/%d heads "
                      "of %d: %s",
                      shape->backward ? "the backward" : "the forward", shape->rows, shape->seq,
                      shape->heads, shape->kv_heads, shape->head_dim, c->plan[i]->why.text);
        return NULL;
    }
    return c->plan[i];
}

/* Where strides aren't known yet (whoever asks for the workspace has no tensors) they are those of
 * one matrix q, k, v side by side; gradients lie as their tensors do. */
static struct slide_cudnn_shape shape_of(const struct slide_attn *a, bool backward)
{
    int64_t q = (int64_t)a->heads * a->head_dim, kv = (int64_t)a->kv_heads * a->head_dim;
    int64_t q_stride = a->q_stride ? a->q_stride : q + 2 * kv;
    int64_t kv_stride = a->kv_stride ? a->kv_stride : q + 2 * kv;
    return (struct slide_cudnn_shape){.q_stride = q_stride,
                                      .kv_stride = kv_stride,
                                      .o_stride = a->o_stride ? a->o_stride : q,
                                      .dq_stride = !backward      ? 0
                                                   : a->dq_stride ? a->dq_stride
                                                                  : q_stride,
                                      .dkv_stride = !backward       ? 0
                                                    : a->dkv_stride ? a->dkv_stride
                                                                    : kv_stride,
                                      .rows = a->rows,
                                      .seq = a->seq,
                                      .heads = a->heads,
                                      .kv_heads = a->kv_heads,
                                      .head_dim = a->head_dim,
                                      .window = a->window > 0 && a->window < a->seq ? a->window : 0,
                                      .backward = backward};
}

/* What is accepted and wrong, or not for these graphs; cuDNN is asked about the rest. */
static int check_form(const struct slide_attn *a, struct slide_err *err)
{
    const void *pointer[] = {a->q,   a->k,  a->v,  a->o,  a->lse,
                             a->d_o, a->dq, a->dk, a->dv, a->workspace};
    int64_t q = (int64_t)a->heads * a->head_dim, kv = (int64_t)a->kv_heads * a->head_dim;
    struct slide_cudnn_shape s = shape_of(a, true);
    if (a->dtype != SLIDE_BF16)
        return slide_err_set(err, SLIDE_EINVAL, "only BF16 goes through cuDNN");
    if (a->documents)
        return slide_err_set(err, SLIDE_EINVAL, "rows of several documents don't go through cuDNN");
    if (a->rows < 1 || a->seq < 1 || a->seq > SEQ_MAX || a->heads < 1 || a->kv_heads < 1)
        return slide_err_set(err, SLIDE_EINVAL, "%d rows of %d tokens, %d/%d heads", a->rows,
                             a->seq, a->heads, a->kv_heads);
    if (a->seq == 1) /* an engine of its own kind, which nobody has tried */
        return slide_err_set(err, SLIDE_EINVAL, "rows of a single token don't go through cuDNN");
    if (a->head_dim < 8 || a->head_dim % 8 || a->head_dim > 256)
        return slide_err_set(err, SLIDE_EINVAL, "cuDNN has heads of 8, 16, ... 256, not %d",
                             a->head_dim);
    if (a->heads % a->kv_heads)
        return slide_err_set(err, SLIDE_EINVAL, "%d heads are no multiple of %d KV heads", a->heads,
                             a->kv_heads);
    if (s.q_stride < q || s.kv_stride < kv || s.o_stride < q || s.dq_stride < q ||
        s.dkv_stride < kv)
        return slide_err_set(err, SLIDE_EINVAL, "a stride is less than the heads of a token");
    if ((s.q_stride | s.kv_stride | s.o_stride | s.dq_stride | s.dkv_stride) % 8)
        return slide_err_set(err, SLIDE_EINVAL, "a stride is no multiple of 8 elements");
    for (size_t i = 0; i < sizeof pointer / sizeof *pointer; i++)
        if ((uintptr_t)pointer[i] % 16)
            return slide_err_set(err, SLIDE_EINVAL, "a pointer is not 16-byte aligned");
    return 0;
}

/* ---- the split ---- */

/* What a backward's two statistics take each: D, and the piece of `lse` where it isn't aligned. */
static size_t stats_bytes(const struct slide_cudnn_shape *s)
{
    return aligned((size_t)s->rows * (size_t)s->heads * (size_t)s->seq * sizeof(float));
}

/* Of workspace: both, then cuDNN's own. */
static size_t need_of(const struct slide_cudnn_plan *plan)
{
    return aligned(plan->workspace) + (plan->shape.backward ? 2 * stats_bytes(&plan->shape) : 0);
}

/* The same before there is a plan, as cuDNN's engine on Hopper wants it (exactly, so that what was
 * asked for is enough later); only where to start from. */
static double estimate(const struct slide_cudnn_shape *s)
{
    double seq = s->seq, heads = (double)s->rows * s->heads;
    double s64 = (s->seq + 63) / 64 * 64, s128 = (s->seq + 127) / 128 * 128;
    double sums = s->heads == s->kv_heads ? 0 : 4 * heads * seq * s->head_dim;
    double own = sums + 2 * heads * s64 * s128 + ALIGN;
    return ceil(own / ALIGN) * ALIGN + 2.0 * (double)stats_bytes(s);
}

/* The next smaller piece: half of the rows, then fewer KV heads that divide all. False: none. */
static bool shrink(const struct slide_attn *a, struct split *s)
{
    if (s->rows > 1) {
        s->rows = (s->rows + 1) / 2;
        return true;
    }
    int32_t kv = s->kv_heads - 1;
    while (kv > 0 && a->kv_heads % kv)
        kv--;
    if (kv < 1)
        return false;
    s->kv_heads = kv;
    return true;
}

static struct slide_cudnn_shape piece_of(const struct slide_attn *a, int32_t rows, int32_t kv_heads)
{
    struct slide_cudnn_shape s = shape_of(a, true);
    s.rows = rows;
    s.heads = a->heads / a->kv_heads * kv_heads;
    s.kv_heads = kv_heads;
    return s;
}

/* Rows in equal calls, but for the last. */
static void even_rows(const struct slide_attn *a, struct split *s)
{
    int32_t calls = (a->rows - 1) / s->rows + 1;
    s->rows = (a->rows - 1) / calls + 1;
}

static int split_plans(struct slide_cuda_cudnn *c, const struct slide_attn *a, struct split *s,
                       struct slide_err *err)
{
    struct slide_cudnn_shape piece = piece_of(a, s->rows, s->kv_heads);
    s->rest = NULL;
    s->main = plan_of(c, &piece, err);
    if (!s->main)
        return -1;
    s->bytes = need_of(s->main);
    if (a->rows % s->rows) {
        piece.rows = a->rows % s->rows;
        s->rest = plan_of(c, &piece, err);
        if (!s->rest)
            return -1;
        s->bytes = need_of(s->rest) > s->bytes ? need_of(s->rest) : s->bytes;
    }
    return 0;
}

static int split_of(struct slide_cuda_cudnn *c, const struct slide_attn *a, struct split *s,
                    struct slide_err *err)
{
    size_t room = a->workspace_bytes ? a->workspace_bytes : SIZE_MAX;
    size_t aim = room < c->limit ? room : c->limit;
    struct slide_cudnn_shape piece;
    *s = (struct split){.rows = a->rows, .kv_heads = a->kv_heads};
    do {
        piece = piece_of(a, s->rows, s->kv_heads);
    } while (estimate(&piece) > (double)aim && shrink(a, s));
    do {
        even_rows(a, s);
        if (split_plans(c, a, s, err))
            return -1;
    } while (s->bytes > aim && shrink(a, s));
    if (s->bytes > room)
        return slide_err_set(err, SLIDE_EMEM,
                             "the backward of one KV head needs %zu bytes of "
                             "workspace, there are %zu",
                             s->bytes, room);
    return 0;
}

/* Both directions, ready to run: 0, or -1 with the reason. */
static int prepare(struct slide_cuda_cudnn *c, const struct slide_attn *a,
                   const struct slide_cudnn_plan **fwd, struct split *bwd, struct slide_err *err)
{
    if (check_form(a, err))
        return -1;
    struct slide_cudnn_shape whole = shape_of(a, false);
    *fwd = plan_of(c, &whole, err);
    if (!*fwd || split_of(c, a, bwd, err))
        return -1;
    if (a->workspace_bytes && need_of(*fwd) > a->workspace_bytes)
        return slide_err_set(err, SLIDE_EMEM,
                             "the forward needs %zu bytes of workspace, there "
                             "are %zu",
                             need_of(*fwd), a->workspace_bytes);
    return 0;
}

bool slide_cuda_cudnn_supports(struct slide_cuda_cudnn *cudnn, const struct slide_attn *attn,
                               struct slide_err *err)
{
    const struct slide_cudnn_plan *fwd;
    struct split bwd;
    return !prepare(cudnn, attn, &fwd, &bwd, err);
}

size_t slide_cuda_cudnn_workspace(struct slide_cuda_cudnn *cudnn, const struct slide_attn *attn)
{
    const struct slide_cudnn_plan *fwd;
    struct split bwd;
    if (prepare(cudnn, attn, &fwd, &bwd, NULL))
        return 0;
    return need_of(fwd) > bwd.bytes ? need_of(fwd) : bwd.bytes;
}

/* ---- running ---- */

/* Elements of BF16 from `base`; the tensors that are only read lose their const here. */
static void *at(const void *base, int64_t elements)
{
    return (unsigned char *)(uintptr_t)base + elements * 2;
}

static int check_run(const struct slide_cuda_cudnn *c, const struct slide_attn *a, size_t bytes,
                     struct slide_err *err)
{
    if (bytes > a->workspace_bytes || (uintptr_t)a->workspace % ALIGN)
        return slide_err_set(err, SLIDE_EINVAL,
                             "cuDNN's attention needs %zu bytes of workspace, "
                             "aligned to %u; there are %zu at %p",
                             bytes, ALIGN, a->workspace_bytes, a->workspace);
    return enter(c->device, err);
}

int slide_cuda_cudnn_fwd(struct slide_cuda_cudnn *cudnn, struct slide_lane *lane,
                         const struct slide_attn *attn, struct slide_err *err)
{
    float scale = attn->scale, minus_inf = -INFINITY, window = (float)attn->window;
    if (check_form(attn, err))
        return -1;
    struct slide_cudnn_shape whole = shape_of(attn, false);
    const struct slide_cudnn_plan *plan = plan_of(cudnn, &whole, err);
    if (!plan || check_run(cudnn, attn, need_of(plan), err))
        return -1;
    void *pointer[SLIDE_CUDNN_IDS] = {
        [SLIDE_CUDNN_Q] = at(attn->q, 0),     [SLIDE_CUDNN_K] = at(attn->k, 0),
        [SLIDE_CUDNN_V] = at(attn->v, 0),     [SLIDE_CUDNN_O] = attn->o,
        [SLIDE_CUDNN_STATS] = attn->lse,      [SLIDE_CUDNN_SCALE] = &scale,
        [SLIDE_CUDNN_MINUS_INF] = &minus_inf, [SLIDE_CUDNN_WINDOW] = &window};
    return slide_cudnn_plan_run(plan, pointer, attn->workspace, lane->stream, err);
}

/* A piece of `lse` starts anywhere where the tokens of its heads are an odd number: cuDNN, told of
 * 16-byte alignment, is given a copy then. */
static int align_stats(struct slide_lane *lane, const struct slide_cudnn_shape *s, void **stats,
                       void *copy, struct slide_err *err)
{
    size_t bytes = (size_t)s->rows * (size_t)s->heads * (size_t)s->seq * sizeof(float);
    if ((uintptr_t)*stats % 16 == 0)
        return 0;
    if (slide_cuda_check(lane->device,
                         lane->device->driver->cuMemcpyDtoDAsync((CUdeviceptr)(uintptr_t)copy,
                                                                 (CUdeviceptr)(uintptr_t)*stats,
                                                                 bytes, lane->stream),
                         "cuMemcpyDtoDAsync", err))
        return -1;
    *stats = copy;
    return 0;
}

int slide_cuda_cudnn_bwd(struct slide_cuda_cudnn *cudnn, struct slide_lane *lane,
                         const struct slide_attn *attn, struct slide_err *err)
{
    float scale = attn->scale, minus_inf = -INFINITY, window = (float)attn->window, one = 1;
    struct split s;
    if (check_form(attn, err) || split_of(cudnn, attn, &s, err) ||
        check_run(cudnn, attn, s.bytes, err))
        return -1;
    for (int64_t row = 0; row < attn->rows; row += s.rows)
        for (int64_t kv = 0; kv < attn->kv_heads; kv += s.kv_heads) {
            const struct slide_cudnn_plan *plan = row + s.rows <= attn->rows ? s.main : s.rest;
            const struct slide_cudnn_shape *p = &plan->shape;
            int64_t token = row * attn->seq, head = kv * (attn->heads / attn->kv_heads);
            int64_t q_at = head * attn->head_dim, kv_at = kv * attn->head_dim;
            unsigned char *workspace = attn->workspace;
            void *pointer[SLIDE_CUDNN_IDS] = {
                [SLIDE_CUDNN_Q] = at(attn->q, token * p->q_stride + q_at),
                [SLIDE_CUDNN_K] = at(attn->k, token * p->kv_stride + kv_at),
                [SLIDE_CUDNN_V] = at(attn->v, token * p->kv_stride + kv_at),
                [SLIDE_CUDNN_O] = at(attn->o, token * p->o_stride + q_at),
                [SLIDE_CUDNN_STATS] = attn->lse + (row * attn->heads + head) * attn->seq,
                [SLIDE_CUDNN_D_O] = at(attn->d_o, token * p->o_stride + q_at),
                [SLIDE_CUDNN_DQ] = at(attn->dq, token * p->dq_stride + q_at),
                [SLIDE_CUDNN_DK] = at(attn->dk, token * p->dkv_stride + kv_at),
                [SLIDE_CUDNN_DV] = at(attn->dv, token * p->dkv_stride + kv_at),
                [SLIDE_CUDNN_DELTA] = workspace,
                [SLIDE_CUDNN_SCALE] = &scale,
                [SLIDE_CUDNN_MINUS_INF] = &minus_inf,
                [SLIDE_CUDNN_ONE] = &one,
                [SLIDE_CUDNN_WINDOW] = &window};
            workspace += stats_bytes(p);
            if (align_stats(lane, p, &pointer[SLIDE_CUDNN_STATS], workspace, err) ||
                slide_cudnn_plan_run(plan, pointer, workspace + stats_bytes(p), lane->stream, err))
                return -1;
        }
    return 0;
}
