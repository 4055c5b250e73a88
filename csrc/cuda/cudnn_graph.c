/* The two graphs of attention that cuDNN's fused engines recognise, node by node: the forward, and
 * the backward in the shape that is the request for determinism (dS times K straight into dQ,
 * without FP32 scratch that several blocks add to). Descriptors are 4-D, dims in the order batch,
 * head, token, element; strides say how they lie in memory. GQA is nothing but fewer heads of K and
 * V. The mask is causal; a window adds a second one, in the same way.
 *
 * The builder's first error makes all later calls do nothing, so that a graph reads as a list.
 * Called by cudnn_plan.c. */
#include "cuda/cudnn_graph.h"

#include <string.h>

typedef cudnnBackendDescriptor_t desc;

/* Dims and strides of a tensor. */
struct view {
    int64_t dim[4], stride[4];
};

/* ---- descriptors ---- */

int slide_cudnn_check(const struct slide_cudnn *api, cudnnStatus_t status, const char *what,
                      struct slide_err *err)
{
    char last[512] = "";
    if (!status)
        return 0;
    api->cudnnGetLastErrorString(last, sizeof last);
    for (char *c = last; *c; c++)
        if (*c == '\n')
            *c = ' ';
    bool memory = status == CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED ||
                  status == CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED;
    return slide_err_set(err, memory ? SLIDE_EMEM : SLIDE_EDEVICE, "%s: %s (%d)%s%s", what,
                         api->cudnnGetErrorString(status), (int)status, *last ? ": " : "", last);
}

static void check(struct slide_cudnn_graph *g, cudnnStatus_t status, const char *what)
{
    if (slide_cudnn_check(g->api, status, what, g->err))
        g->failed = true;
}

static desc make(struct slide_cudnn_graph *g, cudnnBackendDescriptorType_t type)
{
    desc d = NULL;
    if (g->failed)
        return NULL;
    if (g->descriptors == SLIDE_CUDNN_DESCRIPTORS) {
        slide_err_set(g->err, SLIDE_ESTATE, "a graph of more than %d descriptors", g->descriptors);
        g->failed = true;
        return NULL;
    }
    check(g, g->api->cudnnBackendCreateDescriptor(type, &d), "cudnnBackendCreateDescriptor");
    if (!g->failed)
        g->descriptor[g->descriptors++] = d;
    return d;
}

static void set(struct slide_cudnn_graph *g, desc d, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t count, const void *values)
{
    if (!g->failed)
        check(g, g->api->cudnnBackendSetAttribute(d, name, type, count, values),
              "cudnnBackendSetAttribute");
}

static void set_desc(struct slide_cudnn_graph *g, desc d, cudnnBackendAttributeName_t name,
                     desc value)
{
    if (value)
        set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static desc finish(struct slide_cudnn_graph *g, desc d, const char *what)
{
    if (!g->failed)
        check(g, g->api->cudnnBackendFinalize(d), what);
    return d;
}

static void add_node(struct slide_cudnn_graph *g, desc d, const char *what)
{
    finish(g, d, what);
    if (g->nodes == (int)(sizeof g->node / sizeof *g->node)) {
        slide_err_set(g->err, SLIDE_ESTATE, "a graph of more than %d nodes", g->nodes);
        g->failed = true;
    }
    if (!g->failed)
        g->node[g->nodes++] = d;
}

/* ---- tensors ---- */

/* [batch, heads, rows, cols], packed. */
static struct view packed(int64_t batch, int64_t heads, int64_t rows, int64_t cols)
{
    return (struct view){{batch, heads, rows, cols}, {heads * rows * cols, rows * cols, cols, 1}};
}

/* [batch, heads, seq, head_dim] of memory [batch, seq, heads, head_dim], `stride` a token. */
static struct view tokens(const struct slide_cudnn_shape *s, int64_t heads, int64_t stride)
{
    return (struct view){{s->rows, heads, s->seq, s->head_dim},
                         {s->seq * stride, s->head_dim, stride, 1}};
}

static struct view transposed(struct view v)
{
    return (struct view){{v.dim[0], v.dim[1], v.dim[3], v.dim[2]},
                         {v.stride[0], v.stride[1], v.stride[3], v.stride[2]}};
}

/* Scores in the other order: the same dims, keys' index slow and queries' fast. */
static struct view scores_transposed(struct view v)
{
    return (struct view){{v.dim[0], v.dim[1], v.dim[2], v.dim[3]},
                         {v.stride[0], v.stride[1], 1, v.dim[2]}};
}

static desc tensor(struct slide_cudnn_graph *g, int64_t id, cudnnDataType_t type,
                   const struct view *v, bool is_virtual, bool by_value)
{
    int64_t alignment = 16;
    desc d = make(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    set(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, v->dim);
    set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, v->stride);
    set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &id);
    set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    if (is_virtual)
        set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
    if (by_value)
        set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    return finish(g, d, "cudnnBackendFinalize of a tensor");
}

/* One that the run is given. */
static desc real(struct slide_cudnn_graph *g, enum slide_cudnn_id id, cudnnDataType_t type,
                 struct view v)
{
    g->has[id] = true;
    return tensor(g, id, type, &v, false, false);
}

static desc scalar(struct slide_cudnn_graph *g, enum slide_cudnn_id id)
{
    struct view v = packed(1, 1, 1, 1);
    g->has[id] = true;
    return tensor(g, id, CUDNN_DATA_FLOAT, &v, false, true);
}

/* One that stays inside of the engine, or in its workspace. */
static desc inner(struct slide_cudnn_graph *g, cudnnDataType_t type, struct view v)
{
    return tensor(g, g->virtual_id++, type, &v, true, false);
}

/* ---- nodes ---- */

/* y = mode(x, b), or t ? x : b; b and t may be NULL. `axis`: of GEN_INDEX, else -1. Returns y. */
static desc pointwise_axis(struct slide_cudnn_graph *g, cudnnPointwiseMode_t mode, int64_t axis,
                           cudnnDataType_t compute, desc x, desc b, desc t, desc y)
{
    desc how = make(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set(g, how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    if (axis >= 0)
        set(g, how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    finish(g, how, "cudnnBackendFinalize of a pointwise operator");
    desc node = make(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_desc(g, node, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    set_desc(g, node, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    set_desc(g, node, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    set_desc(g, node, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set_desc(g, node, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    add_node(g, node, "cudnnBackendFinalize of a pointwise node");
    return y;
}

static desc pointwise(struct slide_cudnn_graph *g, cudnnPointwiseMode_t mode, desc x, desc b,
                      desc y)
{
    return pointwise_axis(g, mode, -1, CUDNN_DATA_FLOAT, x, b, NULL, y);
}

static desc matmul(struct slide_cudnn_graph *g, desc a, desc b, desc c)
{
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    desc how = make(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    finish(g, how, "cudnnBackendFinalize of a matmul operator");
    desc node = make(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_desc(g, node, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_desc(g, node, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_desc(g, node, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    set_desc(g, node, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    add_node(g, node, "cudnnBackendFinalize of a matmul node");
    return c;
}

static desc reduction(struct slide_cudnn_graph *g, cudnnReduceTensorOp_t op, desc x, desc y)
{
    cudnnDataType_t compute = CUDNN_DATA_FLOAT;
    desc how = make(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &op);
    set(g, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &compute);
    finish(g, how, "cudnnBackendFinalize of a reduction operator");
    desc node = make(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_desc(g, node, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_desc(g, node, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    set_desc(g, node, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    add_node(g, node, "cudnnBackendFinalize of a reduction node");
    return y;
}

static desc reshape(struct slide_cudnn_graph *g, desc x, desc y)
{
    desc node = make(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_desc(g, node, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_desc(g, node, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    add_node(g, node, "cudnnBackendFinalize of a reshape node");
    return y;
}

/* ---- attention ---- */

static desc index_along(struct slide_cudnn_graph *g, int64_t axis, desc x, struct view square)
{
    return pointwise_axis(g, CUDNN_POINTWISE_GEN_INDEX, axis, CUDNN_DATA_FLOAT, x, NULL, NULL,
                          inner(g, CUDNN_DATA_INT32, square));
}

/* a and b are compared, and x is -inf where it doesn't hold. */
static desc keep_where(struct slide_cudnn_graph *g, cudnnPointwiseMode_t compare, desc a, desc b,
                       desc x, desc minus_inf, struct view square)
{
    desc keep = pointwise_axis(g, compare, -1, CUDNN_DATA_BOOLEAN, a, b, NULL,
                               inner(g, CUDNN_DATA_BOOLEAN, square));
    return pointwise_axis(g, CUDNN_POINTWISE_BINARY_SELECT, -1, CUDNN_DATA_FLOAT, x, minus_inf,
                          keep, inner(g, CUDNN_DATA_FLOAT, square));
}

/* Query i keeps key j where j <= i and, with a window W, where j + W > i. */
static desc mask(struct slide_cudnn_graph *g, const struct slide_cudnn_shape *s, desc x,
                 struct view square)
{
    desc minus_inf = scalar(g, SLIDE_CUDNN_MINUS_INF);
    desc row = index_along(g, 2, x, square), col = index_along(g, 3, x, square);
    x = keep_where(g, CUDNN_POINTWISE_CMP_GE, row, col, x, minus_inf, square);
    if (!s->window)
        return x;
    row = index_along(g, 2, x, square);
    col = index_along(g, 3, x, square);
    desc end = pointwise(g, CUDNN_POINTWISE_ADD, col, scalar(g, SLIDE_CUDNN_WINDOW),
                         inner(g, CUDNN_DATA_FLOAT, square));
    return keep_where(g, CUDNN_POINTWISE_CMP_GT, end, row, x, minus_inf, square);
}

static void forward(struct slide_cudnn_graph *g, const struct slide_cudnn_shape *s)
{
    const cudnnDataType_t bf16 = CUDNN_DATA_BFLOAT16, f32 = CUDNN_DATA_FLOAT;
    struct view square = packed(s->rows, s->heads, s->seq, s->seq);
    struct view column = packed(s->rows, s->heads, s->seq, 1);
    struct view kv = tokens(s, s->kv_heads, s->kv_stride);
    desc q = real(g, SLIDE_CUDNN_Q, bf16, tokens(s, s->heads, s->q_stride));
    desc kt = real(g, SLIDE_CUDNN_K, bf16, transposed(kv));
    desc v = real(g, SLIDE_CUDNN_V, bf16, kv);
    desc x = matmul(g, q, kt, inner(g, f32, square));
    x = pointwise(g, CUDNN_POINTWISE_MUL, x, scalar(g, SLIDE_CUDNN_SCALE), inner(g, f32, square));
    x = mask(g, s, x, square);
    desc max = reduction(g, CUDNN_REDUCE_TENSOR_MAX, x, inner(g, f32, column));
    desc e = pointwise(g, CUDNN_POINTWISE_SUB, x, max, inner(g, f32, square));
    e = pointwise(g, CUDNN_POINTWISE_EXP, e, NULL, inner(g, f32, square));
    desc sum = reduction(g, CUDNN_REDUCE_TENSOR_ADD, e, inner(g, f32, column));
    desc log = pointwise(g, CUDNN_POINTWISE_LOG, sum, NULL, inner(g, f32, column));
    pointwise(g, CUDNN_POINTWISE_ADD, log, max, real(g, SLIDE_CUDNN_STATS, f32, column));
    desc p = pointwise(g, CUDNN_POINTWISE_DIV, e, sum, inner(g, bf16, square));
    matmul(g, p, v, real(g, SLIDE_CUDNN_O, bf16, tokens(s, s->heads, s->o_stride)));
}

/* a times b is the gradient of K or V: a head's queries' part each, then summed over those of a
 * KV head. */
static void kv_gradient(struct slide_cudnn_graph *g, const struct slide_cudnn_shape *s, desc a,
                        desc b, enum slide_cudnn_id id)
{
    desc out = real(g, id, CUDNN_DATA_BFLOAT16, tokens(s, s->kv_heads, s->dkv_stride));
    if (s->heads == s->kv_heads) {
        matmul(g, a, b, out);
        return;
    }
    desc full = matmul(
        g, a, b, inner(g, CUDNN_DATA_BFLOAT16, packed(s->rows, s->heads, s->seq, s->head_dim)));
    reduction(g, CUDNN_REDUCE_TENSOR_ADD, full, out);
}

static void backward(struct slide_cudnn_graph *g, const struct slide_cudnn_shape *s)
{
    const cudnnDataType_t bf16 = CUDNN_DATA_BFLOAT16, f32 = CUDNN_DATA_FLOAT;
    struct view square = packed(s->rows, s->heads, s->seq, s->seq);
    struct view column = packed(s->rows, s->heads, s->seq, 1);
    struct view wide = packed(s->rows, s->heads, s->seq, s->head_dim);
    struct view kv = tokens(s, s->kv_heads, s->kv_stride);
    desc q = real(g, SLIDE_CUDNN_Q, bf16, tokens(s, s->heads, s->q_stride));
    desc kt = real(g, SLIDE_CUDNN_K, bf16, transposed(kv));
    desc vt = real(g, SLIDE_CUDNN_V, bf16, transposed(kv));
    desc o = real(g, SLIDE_CUDNN_O, bf16, tokens(s, s->heads, s->o_stride));
    desc d_o = real(g, SLIDE_CUDNN_D_O, bf16, tokens(s, s->heads, s->o_stride));
    desc stats = real(g, SLIDE_CUDNN_STATS, f32, column);
    desc scale = scalar(g, SLIDE_CUDNN_SCALE);
    /* D = rowsum(dO O) */
    desc x = pointwise(g, CUDNN_POINTWISE_MUL, d_o, o, inner(g, f32, wide));
    x = reduction(g, CUDNN_REDUCE_TENSOR_ADD, x, inner(g, f32, column));
    desc delta = pointwise(g, CUDNN_POINTWISE_MUL, x, scalar(g, SLIDE_CUDNN_ONE),
                           real(g, SLIDE_CUDNN_DELTA, f32, column));
    /* P = exp(scale Q K' - stats), masked */
    x = matmul(g, q, kt, inner(g, f32, square));
    x = pointwise(g, CUDNN_POINTWISE_MUL, x, scale, inner(g, f32, square));
    x = pointwise(g, CUDNN_POINTWISE_SUB, x, stats, inner(g, f32, square));
    x = mask(g, s, x, square);
    desc p = pointwise(g, CUDNN_POINTWISE_EXP, x, NULL, inner(g, f32, square));
    /* dV = P' dO */
    desc pt = reshape(g, p, inner(g, bf16, scores_transposed(square)));
    kv_gradient(g, s, pt, d_o, SLIDE_CUDNN_DV);
    /* dS = scale P (dO V' - D) */
    x = matmul(g, d_o, vt, inner(g, f32, square));
    x = pointwise(g, CUDNN_POINTWISE_SUB, x, delta, inner(g, f32, square));
    x = pointwise(g, CUDNN_POINTWISE_MUL, x, p, inner(g, f32, square));
    desc ds = pointwise(g, CUDNN_POINTWISE_MUL, x, scale, inner(g, f32, square));
    /* dK = dS' Q, dQ = dS K */
    desc dst = reshape(g, ds, inner(g, bf16, scores_transposed(square)));
    kv_gradient(g, s, dst, q, SLIDE_CUDNN_DK);
    desc k = reshape(g, kt, inner(g, bf16, kv));
    matmul(g, ds, k, real(g, SLIDE_CUDNN_DQ, bf16, tokens(s, s->heads, s->dq_stride)));
}

int slide_cudnn_graph_init(struct slide_cudnn_graph *graph, const struct slide_cudnn_target *target,
                           const struct slide_cudnn_shape *shape, struct slide_err *err)
{
    memset(graph, 0, sizeof *graph);
    graph->api = &target->api;
    graph->err = err;
    graph->virtual_id = SLIDE_CUDNN_IDS;
    if (shape->backward)
        backward(graph, shape);
    else
        forward(graph, shape);
    desc d = graph->graph = make(graph, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(graph, d, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, graph->nodes,
        graph->node);
    if (target->handle)
        set(graph, d, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &target->handle);
    finish(graph, d, "cudnnBackendFinalize of a graph");
    return graph->failed ? -1 : 0;
}

void slide_cudnn_graph_fini(struct slide_cudnn_graph *graph)
{
    while (graph->descriptors > 0)
        graph->api->cudnnBackendDestroyDescriptor(graph->descriptor[--graph->descriptors]);
}

int slide_cudnn_graph_ids(const struct slide_cudnn_shape *shape, int64_t *id)
{
    int n = 0;
    for (int i = 0; i < SLIDE_CUDNN_IDS; i++) {
        bool gradient = i >= SLIDE_CUDNN_D_O && i <= SLIDE_CUDNN_DELTA;
        if (i == SLIDE_CUDNN_WINDOW ? shape->window != 0
                                    : shape->backward || !(gradient || i == SLIDE_CUDNN_ONE))
            id[n++] = i;
    }
    return n;
}
