/* The interpreter of op tables. Forward takes the ops in order, backward in reverse; where the
 * gradient of a value lies, and whether it has a part in it already (a residual), comes from
 * memory.c's plan. Formulas: models.md, sections 1 and 2. */
#include "pipe/program.h"

#include <math.h>
#include <stdio.h>

#include "device/device.h"

/* What every op needs, looked up once. */
struct frame {
    const struct slide_program *p;
    const struct slide_model *model;
    const struct slide_config *config;
    const struct slide_unit_table *table;
    const struct slide_unit *unit;
    struct slide_micro *micro;
    struct slide_values *values;
    enum slide_dtype act;
    size_t size;                 /* bytes of act */
    bool live[SLIDE_VALUES_MAX]; /* backward, by gradient root: something is in it */
};

static void frame_init(struct frame *f, const struct slide_program *p)
{
    *f = (struct frame){.p = p,
                        .model = p->layout->model,
                        .config = &p->layout->model->config,
                        .table = slide_model_table(p->layout->model, p->unit),
                        .unit = &p->layout->unit[p->unit],
                        .micro = &p->memory->micro[p->micro],
                        .act = slide_layout_weight_type(p->layout)};
    f->size = slide_dtype_size(f->act);
    if (f->unit->kind == SLIDE_UNIT_BLOCK)
        f->values = slide_memory_values(p->memory, p->unit, p->micro);
}

static void *value(const struct frame *f, int v)
{
    if (v == 0)
        return f->micro->boundary[f->p->unit - 1];
    return v == 1 ? f->micro->boundary[f->p->unit] : f->values->value[v];
}

static void *gradient(const struct frame *f, int v)
{
    void *inner = f->p->memory->gradient[v];
    return inner ? inner : f->micro->dx;
}

static int32_t width(const struct frame *f, int v)
{
    return slide_model_dim(f->model, f->table->value[v].width);
}

static bool has(const struct frame *f, int w)
{
    return w >= 0 && f->unit->tensor[w].count > 0;
}

static const void *weight(const struct frame *f, int w)
{
    return has(f, w) ? f->p->weights + f->unit->tensor[w].offset * f->size : NULL;
}

static float *weight_grad(const struct frame *f, int w)
{
    return f->p->grad + f->unit->tensor[w].offset;
}

static int aux_heads(const struct frame *f)
{
    return f->config->heads + f->config->kv_heads;
}

/* ---- looking for the first Inf or NaN ---- */

/* After an op, when asked for: an error that names unit, op and value. Waits for the device. */
static int look(const struct frame *f, const void *x, enum slide_dtype type, int64_t n,
                const char *op, const char *what, struct slide_err *err)
{
    struct slide_memory *memory = f->p->memory;
    struct slide_lane *lane = f->p->lane;
    struct slide_nonfinite_args a = {.x = x, .found = memory->found, .n = n};
    if (!memory->o.debug || n < 1)
        return 0;
    if (slide_zero(lane, memory->found, sizeof *memory->found, err) ||
        slide_launch_nonfinite(lane, type, &a, err) ||
        slide_copy(lane, memory->host_found, memory->found, sizeof *memory->found, SLIDE_COPY_D2H,
                   err) ||
        slide_lane_sync(lane, &(struct slide_waiter){0}, err))
        return -1;
    if (!*memory->host_found)
        return 0;
    return slide_err_set(err, SLIDE_EDEVICE,
                         "debug_nonfinite: the first Inf or NaN is in %s, after %s of unit %d "
                         "(0 is the embedding), micro-batch %d",
                         what, op, f->p->unit, f->p->micro);
}

static const char *op_name(const struct slide_op *op)
{
    static const char *const name[SLIDE_OP_KINDS] = {"embedding", "norm",      "linear", "q/k norm",
                                                     "rotation",  "attention", "SwiGLU", "loss"};
    return name[op->kind];
}

static int look_value(const struct frame *f, int i, struct slide_err *err)
{
    const struct slide_op *op = &f->table->op[i];
    char what[64];
    snprintf(what, sizeof what, "value %s", f->table->value[op->out].name);
    const void *x = op->kind == SLIDE_OP_EMBED ? f->micro->boundary[f->p->unit] : value(f, op->out);
    return look(f, x, f->act, f->micro->n * width(f, op->out), op_name(op), what, err);
}

static int look_gradients(const struct frame *f, int i, struct slide_err *err)
{
    const struct slide_op *op = &f->table->op[i];
    char what[64], name[64];
    snprintf(name, sizeof name, "the backward of %s", op_name(op));
    snprintf(what, sizeof what, "the gradient of value %s", f->table->value[op->in].name);
    if (op->kind != SLIDE_OP_EMBED &&
        look(f, gradient(f, op->in), f->act, f->micro->n * width(f, op->in), name, what, err))
        return -1;
    const int of[] = {op->w, op->b};
    for (int k = 0; k < 2; k++) {
        if (!has(f, of[k]))
            continue;
        snprintf(what, sizeof what, "the gradient of weight %s", f->table->weight[of[k]].name);
        if (look(f, weight_grad(f, of[k]), SLIDE_F32, (int64_t)f->unit->tensor[of[k]].count, name,
                 what, err))
            return -1;
    }
    return 0;
}

/* ---- norms ---- */

/* The q or k heads (part 0 or 1) of a qkv row as vectors to norm. */
struct heads {
    int64_t offset; /* elements in the row */
    int32_t groups;
    int64_t aux; /* floats in the op's rstd array */
    int w;
};

static struct heads qk_heads(const struct frame *f, const struct slide_op *op, int part)
{
    if (part == 0)
        return (struct heads){0, f->config->heads, 0, op->w};
    return (struct heads){slide_model_dim(f->model, SLIDE_DIM_Q), f->config->kv_heads,
                          f->micro->n * f->config->heads, op->b};
}

static int qknorm_fwd(const struct frame *f, const struct slide_op *op, float *rstd,
                      struct slide_err *err)
{
    int64_t row = width(f, op->in);
    unsigned char *x = value(f, op->in), *y = value(f, op->out);
    if (slide_copy(f->p->lane, y, x, (size_t)(f->micro->n * row) * f->size, SLIDE_COPY_D2D, err))
        return -1; /* v passes through */
    for (int part = 0; part < 2; part++) {
        struct heads h = qk_heads(f, op, part);
        struct slide_rmsnorm_fwd_args a = {.x = x + (size_t)h.offset * f->size,
                                           .y = y + (size_t)h.offset * f->size,
                                           .w = weight(f, h.w),
                                           .rstd = rstd + h.aux,
                                           .n = f->micro->n,
                                           .x_stride = row,
                                           .y_stride = row,
                                           .groups = h.groups,
                                           .cols = f->config->head_dim,
                                           .eps = (float)f->config->rms_eps};
        if (slide_launch_rmsnorm_fwd(f->p->lane, f->act, &a, err))
            return -1;
    }
    return 0;
}

static int qknorm_bwd(const struct frame *f, const struct slide_op *op, const float *rstd,
                      struct slide_err *err)
{
    int64_t row = width(f, op->in);
    const unsigned char *x = value(f, op->in);
    unsigned char *d = gradient(f, op->in); /* == gradient(out): in place */
    for (int part = 0; part < 2; part++) {
        struct heads h = qk_heads(f, op, part);
        struct slide_rmsnorm_bwd_args a = {.dy = d + (size_t)h.offset * f->size,
                                           .dx = d + (size_t)h.offset * f->size,
                                           .x = x + (size_t)h.offset * f->size,
                                           .w = weight(f, h.w),
                                           .rstd = rstd + h.aux,
                                           .dw = weight_grad(f, h.w),
                                           .scratch = f->p->memory->norm_scratch,
                                           .n = f->micro->n,
                                           .dy_stride = row,
                                           .x_stride = row,
                                           .dx_stride = row,
                                           .groups = h.groups,
                                           .cols = f->config->head_dim};
        if (slide_launch_rmsnorm_bwd(f->p->lane, f->act, &a, err))
            return -1;
    }
    return 0;
}

static int norm_fwd(const struct frame *f, const struct slide_op *op, float *rstd,
                    struct slide_err *err)
{
    int32_t cols = width(f, op->in);
    struct slide_rmsnorm_fwd_args a = {.x = value(f, op->in),
                                       .w = weight(f, op->w),
                                       .y = value(f, op->out),
                                       .rstd = rstd,
                                       .n = f->micro->n,
                                       .x_stride = cols,
                                       .y_stride = cols,
                                       .groups = 1,
                                       .cols = cols,
                                       .eps = (float)f->config->rms_eps};
    return slide_launch_rmsnorm_fwd(f->p->lane, f->act, &a, err);
}

static int norm_bwd(struct frame *f, const struct slide_op *op, const float *rstd,
                    struct slide_err *err)
{
    int32_t cols = width(f, op->in);
    int root = f->p->memory->gradient_root[op->in];
    struct slide_rmsnorm_bwd_args a = {.dy = gradient(f, op->out),
                                       .x = value(f, op->in),
                                       .w = weight(f, op->w),
                                       .rstd = rstd,
                                       .dx = gradient(f, op->in),
                                       .dw = weight_grad(f, op->w),
                                       .scratch = f->p->memory->norm_scratch,
                                       .n = f->micro->n,
                                       .dy_stride = cols,
                                       .x_stride = cols,
                                       .dx_stride = cols,
                                       .groups = 1,
                                       .cols = cols,
                                       .add = f->live[root]};
    f->live[root] = true;
    return slide_launch_rmsnorm_bwd(f->p->lane, f->act, &a, err);
}

/* ---- linear ---- */

static int gemm(const struct frame *f, struct slide_gemm *g, struct slide_err *err)
{
    g->workspace = f->p->memory->gemm_workspace;
    g->workspace_bytes = f->p->memory->gemm_bytes;
    return slide_gemm(f->p->lane, g, err);
}

static int linear_fwd(const struct frame *f, const struct slide_op *op, struct slide_err *err)
{
    int32_t in = width(f, op->in), out = width(f, op->out);
    struct slide_gemm g = {.a = value(f, op->in),
                           .b = weight(f, op->w),
                           .out = value(f, op->out),
                           .add = op->res == SLIDE_NO_VALUE ? NULL : value(f, op->res),
                           .bias = weight(f, op->b),
                           .lda = in,
                           .ldb = in,
                           .ldo = out,
                           .m = (int32_t)f->micro->n,
                           .n = out,
                           .k = in,
                           .trans_b = 1,
                           .in_type = f->act,
                           .out_type = f->act};
    return gemm(f, &g, err);
}

static int linear_bwd(struct frame *f, const struct slide_op *op, struct slide_err *err)
{
    int32_t in = width(f, op->in), out = width(f, op->out), n = (int32_t)f->micro->n;
    int root = f->p->memory->gradient_root[op->in];
    void *dout = gradient(f, op->out), *din = gradient(f, op->in);
    float *dw = weight_grad(f, op->w);
    struct slide_gemm w = {.a = dout,
                           .b = value(f, op->in),
                           .out = dw,
                           .add = f->p->fresh ? NULL : dw,
                           .lda = out,
                           .ldb = in,
                           .ldo = in,
                           .m = out,
                           .n = in,
                           .k = n,
                           .trans_a = 1,
                           .in_type = f->act,
                           .out_type = SLIDE_F32};
    struct slide_gemm x = {.a = dout,
                           .b = weight(f, op->w),
                           .out = din,
                           .add = f->live[root] ? din : NULL,
                           .lda = out,
                           .ldb = in,
                           .ldo = in,
                           .m = n,
                           .n = in,
                           .k = out,
                           .in_type = f->act,
                           .out_type = f->act};
    f->live[root] = true;
    if (has(f, op->b)) {
        struct slide_bias_bwd_args b = {.dy = dout,
                                        .db = weight_grad(f, op->b),
                                        .scratch = f->p->memory->norm_scratch,
                                        .n = n,
                                        .stride = out,
                                        .cols = out};
        if (slide_launch_bias_bwd(f->p->lane, f->act, &b, err))
            return -1;
    }
    return gemm(f, &w, err) || gemm(f, &x, err) ? -1 : 0;
}

/* ---- attention and its rotation ---- */

static int rope(const struct frame *f, void *qkv, int sign, struct slide_err *err)
{
    /* q and k heads lie side by side: one launch rotates both. */
    struct slide_rope_args a = {.x = qkv,
                                .cos = f->micro->cos,
                                .sin = f->micro->sin,
                                .n = f->micro->n,
                                .stride = slide_model_dim(f->model, SLIDE_DIM_QKV),
                                .heads = aux_heads(f),
                                .head_dim = f->config->head_dim,
                                .half = f->config->head_dim / 2,
                                .sign = sign};
    return slide_launch_rope(f->p->lane, f->act, &a, err);
}

static int attention(struct frame *f, const struct slide_op *op, float *lse, bool backward,
                     struct slide_err *err)
{
    int32_t q = slide_model_dim(f->model, SLIDE_DIM_Q),
            kv = slide_model_dim(f->model, SLIDE_DIM_KV);
    int32_t window = slide_model_window(f->model, f->p->unit);
    size_t k_at = (size_t)q * f->size, v_at = (size_t)(q + kv) * f->size;
    unsigned char *x = value(f, op->in);
    struct slide_attn a = {.dtype = f->act,
                           .rows = f->micro->rows,
                           .seq = f->micro->seq,
                           .heads = f->config->heads,
                           .kv_heads = f->config->kv_heads,
                           .head_dim = f->config->head_dim,
                           .window = window,
                           .scale = (float)(1.0 / sqrt((double)f->config->head_dim)),
                           .first = f->micro->first[window > 0],
                           .q = x,
                           .k = x + k_at,
                           .v = x + v_at,
                           .q_stride = q + 2 * kv,
                           .kv_stride = q + 2 * kv,
                           .o = value(f, op->out),
                           .o_stride = q,
                           .lse = lse,
                           .documents = f->micro->documents,
                           .workspace = f->p->memory->attn_workspace,
                           .workspace_bytes = f->p->memory->attn_bytes};
    if (!backward)
        return slide_attn_fwd(f->p->lane, &a, err);
    unsigned char *d = gradient(f, op->in);
    a.d_o = gradient(f, op->out);
    a.dq = d;
    a.dk = d + k_at;
    a.dv = d + v_at;
    a.dq_stride = a.dkv_stride = q + 2 * kv;
    f->live[f->p->memory->gradient_root[op->in]] = true;
    return slide_attn_bwd(f->p->lane, &a, err);
}

/* ---- both directions ---- */

static int op_forward(struct frame *f, int i, struct slide_err *err)
{
    const struct slide_op *op = &f->table->op[i];
    switch (op->kind) {
    case SLIDE_OP_EMBED: {
        struct slide_embed_fwd_args a = {.ids = f->micro->ids,
                                         .table = weight(f, op->w),
                                         .out = f->micro->boundary[f->p->unit],
                                         .n = f->micro->n,
                                         .cols = f->config->hidden};
        return slide_launch_embed_fwd(f->p->lane, f->act, &a, err);
    }
    case SLIDE_OP_NORM:
        return norm_fwd(f, op, f->values->aux[i], err);
    case SLIDE_OP_LINEAR:
        return linear_fwd(f, op, err);
    case SLIDE_OP_QKNORM:
        return qknorm_fwd(f, op, f->values->aux[i], err);
    case SLIDE_OP_ROPE:
        return rope(f, value(f, op->in), 1, err);
    case SLIDE_OP_ATTN:
        return attention(f, op, f->values->aux[i], false, err);
    case SLIDE_OP_SWIGLU: {
        struct slide_swiglu_fwd_args a = {.gu = value(f, op->in),
                                          .out = value(f, op->out),
                                          .n = f->micro->n,
                                          .cols = f->config->inter};
        return slide_launch_swiglu_fwd(f->p->lane, f->act, &a, err);
    }
    default:
        return slide_err_set(err, SLIDE_ESTATE, "op kind %d in unit %d", (int)op->kind, f->p->unit);
    }
}

static int op_backward(struct frame *f, int i, struct slide_err *err)
{
    const struct slide_op *op = &f->table->op[i];
    switch (op->kind) {
    case SLIDE_OP_EMBED: {
        struct slide_embed_bwd_args a = {.ids = f->micro->ids,
                                         .dout = f->micro->dx,
                                         .dtable = weight_grad(f, op->w),
                                         .n = f->micro->n,
                                         .cols = f->config->hidden,
                                         .vocab = f->config->vocab,
                                         .skip = f->config->padding_idx};
        return slide_launch_embed_bwd(f->p->lane, f->act, &a, err);
    }
    case SLIDE_OP_NORM:
        return norm_bwd(f, op, f->values->aux[i], err);
    case SLIDE_OP_LINEAR:
        return linear_bwd(f, op, err);
    case SLIDE_OP_QKNORM:
        return qknorm_bwd(f, op, f->values->aux[i], err);
    case SLIDE_OP_ROPE:
        return rope(f, gradient(f, op->in), -1, err);
    case SLIDE_OP_ATTN:
        return attention(f, op, f->values->aux[i], true, err);
    case SLIDE_OP_SWIGLU: {
        struct slide_swiglu_bwd_args a = {.gu = value(f, op->in),
                                          .dout = gradient(f, op->out),
                                          .dgu = gradient(f, op->in),
                                          .n = f->micro->n,
                                          .cols = f->config->inter};
        f->live[f->p->memory->gradient_root[op->in]] = true;
        return slide_launch_swiglu_bwd(f->p->lane, f->act, &a, err);
    }
    default:
        return slide_err_set(err, SLIDE_ESTATE, "op kind %d in unit %d", (int)op->kind, f->p->unit);
    }
}

int slide_program_forward(const struct slide_program *p, struct slide_err *err)
{
    struct frame f;
    frame_init(&f, p);
    for (int i = 0; i < f.table->ops; i++)
        if (op_forward(&f, i, err) || look_value(&f, i, err))
            return slide_err_note(err, "in the forward of unit %d, op %d", p->unit, i);
    return 0;
}

int slide_program_recompute(const struct slide_program *p, struct slide_err *err)
{
    struct frame f;
    frame_init(&f, p);
    for (int i = 0; i < f.table->ops; i++)
        if (slide_op_repeats(f.model, p->unit, i, p->memory->o.activations[p->unit]) &&
            op_forward(&f, i, err))
            return slide_err_note(err, "in the recompute of unit %d, op %d", p->unit, i);
    return 0;
}

int slide_program_backward(const struct slide_program *p, struct slide_err *err)
{
    struct frame f;
    frame_init(&f, p);
    f.live[p->memory->gradient_root[1]] = true;
    for (int i = f.table->ops - 1; i >= 0; i--)
        if (op_backward(&f, i, err) || look_gradients(&f, i, err))
            return slide_err_note(err, "in the backward of unit %d, op %d", p->unit, i);
    return 0;
}

/* ---- head ---- */

/* One chunk: rows [r, r + n) of the micro-batch. */
static int head_chunk(struct frame *f, const struct slide_head *head, int64_t r, int32_t n,
                      struct slide_err *err)
{
    const struct slide_program *p = f->p;
    struct slide_memory *memory = p->memory;
    int32_t hidden = f->config->hidden, vocab = f->config->vocab;
    int norm = f->table->op[0].w;
    unsigned char *x =
        (unsigned char *)f->micro->boundary[p->unit - 1] + (size_t)r * (size_t)hidden * f->size;
    struct slide_rmsnorm_fwd_args fwd = {.x = x,
                                         .w = weight(f, norm),
                                         .y = memory->head,
                                         .rstd = memory->head_rstd,
                                         .n = n,
                                         .x_stride = hidden,
                                         .y_stride = hidden,
                                         .groups = 1,
                                         .cols = hidden,
                                         .eps = (float)f->config->rms_eps};
    struct slide_gemm z = {.a = memory->head,
                           .b = head->table,
                           .out = memory->logits,
                           .lda = hidden,
                           .ldb = hidden,
                           .ldo = vocab,
                           .m = n,
                           .n = vocab,
                           .k = hidden,
                           .trans_b = 1,
                           .in_type = f->act,
                           .out_type = f->act};
    if (slide_launch_rmsnorm_fwd(p->lane, f->act, &fwd, err) || gemm(f, &z, err) ||
        look(f, memory->logits, f->act, (int64_t)n * vocab, "the head", "the logits", err))
        return -1;
    if (head->mode == SLIDE_HEAD_LOGITS) {
        const void *from = memory->logits;
        size_t count = (size_t)n * (size_t)vocab;
        if (f->act != SLIDE_F32) {
            struct slide_cast_args cast = {.in = memory->logits,
                                           .out = memory->logits_f32,
                                           .n = (int64_t)count,
                                           .from = f->act,
                                           .to = SLIDE_F32};
            from = memory->logits_f32;
            if (slide_launch_cast(p->lane, f->act, &cast, err))
                return -1;
        }
        return slide_copy(p->lane, head->logits + (size_t)r * (size_t)vocab, from, count * 4,
                          SLIDE_COPY_D2H, err);
    }
    bool train = head->mode == SLIDE_HEAD_TRAIN;
    struct slide_ce_args ce = {.z = memory->logits,
                               .labels = f->micro->labels + r,
                               .loss = f->micro->loss + r,
                               .n = n,
                               .vocab = vocab,
                               .grad = train,
                               .scale = head->scale};
    if (slide_launch_ce(p->lane, f->act, &ce, err))
        return -1;
    if (!train)
        return 0;
    if (look(f, memory->logits, f->act, (int64_t)n * vocab, "the loss",
             "the gradient of the logits", err))
        return -1;
    struct slide_gemm dh = {.a = memory->logits,
                            .b = head->table,
                            .out = memory->dhead,
                            .lda = vocab,
                            .ldb = hidden,
                            .ldo = hidden,
                            .m = n,
                            .n = hidden,
                            .k = vocab,
                            .in_type = f->act,
                            .out_type = f->act};
    struct slide_gemm dw = {.a = memory->logits,
                            .b = memory->head,
                            .out = head->table_grad,
                            .add = p->fresh && r == 0 ? NULL : head->table_grad,
                            .lda = vocab,
                            .ldb = hidden,
                            .ldo = hidden,
                            .m = vocab,
                            .n = hidden,
                            .k = n,
                            .trans_a = 1,
                            .in_type = f->act,
                            .out_type = SLIDE_F32};
    struct slide_rmsnorm_bwd_args bwd = {.dy = memory->dhead,
                                         .x = x,
                                         .w = weight(f, norm),
                                         .rstd = memory->head_rstd,
                                         .dx = (unsigned char *)f->micro->dx +
                                               (size_t)r * (size_t)hidden * f->size,
                                         .dw = weight_grad(f, norm),
                                         .scratch = memory->norm_scratch,
                                         .n = n,
                                         .dy_stride = hidden,
                                         .x_stride = hidden,
                                         .dx_stride = hidden,
                                         .groups = 1,
                                         .cols = hidden};
    if (gemm(f, &dh, err) || gemm(f, &dw, err))
        return -1;
    return slide_launch_rmsnorm_bwd(p->lane, f->act, &bwd, err);
}

int slide_program_head(const struct slide_program *p, const struct slide_head *head,
                       struct slide_err *err)
{
    struct frame f;
    frame_init(&f, p);
    int32_t rows = p->memory->o.head_rows;
    for (int64_t r = 0; r < f.micro->n; r += rows) {
        int32_t n = (int32_t)(f.micro->n - r < rows ? f.micro->n - r : rows);
        if (head_chunk(&f, head, r, n, err))
            return slide_err_note(err, "in the head, rows %lld on", (long long)r);
    }
    return 0;
}
