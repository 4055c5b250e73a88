/* The dicts that the engine takes: Spec, Part and MicroBatch of _slidedp.pyi, as tables. What only
 * the trainer can judge (a learning rate, ids against the vocabulary) is left to it; here are types
 * and what the C struct can hold.
 * Called by py_engine.c. */
#include <string.h>

#include "py/py.h"

#define COUNT(table) (sizeof(table) / sizeof *(table))

/* In the order of enum slide_dtype. */
static const char *const file_dtypes[] = {"F32", "BF16", "F16", NULL};
static const char *const gradient_dtypes[] = {"float32", "bfloat16", NULL};
static const char *const deliveries[] = {"auto", "full", "shard", NULL};
static const char *const reductions[] = {"auto", "cpu", "gpu", NULL};
static const char *const pinnings[] = {"auto", "always", "never", NULL};
static const char *const activations[] = {"recompute", "selective", "keep", "offload", NULL};
static const char *const ropes[] = {"default", "linear", "llama3", NULL};

_Static_assert(SLIDE_F32 == 0 && SLIDE_BF16 == 1 && SLIDE_F16 == 2, "order of the names");
_Static_assert(SLIDE_ROPE_DEFAULT == 0 && SLIDE_ROPE_LINEAR == 1 && SLIDE_ROPE_LLAMA3 == 2,
               "order of the names");

/* ---- Spec ---- */

#define MODEL(name, kind, least, most)                                                             \
    {#name, kind, true, offsetof(struct slide_config, name), least, most, NULL, 0, 0}

/* ModelConfig.to_spec() gives all of them; slide_model_init checks what they mean. */
static const struct slide_py_field model_fields[] = {
    {.key = "model_type", .required = true},
    MODEL(hidden, SLIDE_PY_INT32, 0, INT32_MAX),
    MODEL(layers, SLIDE_PY_INT32, 0, INT32_MAX),
    MODEL(heads, SLIDE_PY_INT32, 0, INT32_MAX),
    MODEL(kv_heads, SLIDE_PY_INT32, 0, INT32_MAX),
    MODEL(head_dim, SLIDE_PY_INT32, 0, INT32_MAX),
    MODEL(inter, SLIDE_PY_INT32, 0, INT32_MAX),
    MODEL(vocab, SLIDE_PY_INT32, 0, INT32_MAX),
    MODEL(rms_eps, SLIDE_PY_DOUBLE, 0, 0),
    MODEL(tied, SLIDE_PY_FLAG, 0, 0),
    MODEL(padding_idx, SLIDE_PY_INT32, -1, INT32_MAX),
    MODEL(qkv_bias, SLIDE_PY_FLAG, 0, 0),
    MODEL(o_bias, SLIDE_PY_FLAG, 0, 0),
    MODEL(mlp_bias, SLIDE_PY_FLAG, 0, 0),
    MODEL(sliding_window, SLIDE_PY_INT32, 0, INT32_MAX),
    {.key = "layer_slides", .required = true},
    {.key = "rope",
     .kind = SLIDE_PY_CHOICE,
     .required = true,
     .offset = offsetof(struct slide_config, rope),
     .choices = ropes},
    MODEL(rope_theta, SLIDE_PY_DOUBLE, 0, 0),
    MODEL(rope_factor, SLIDE_PY_DOUBLE, 0, 0),
    MODEL(rope_low, SLIDE_PY_DOUBLE, 0, 0),
    MODEL(rope_high, SLIDE_PY_DOUBLE, 0, 0),
    MODEL(rope_original, SLIDE_PY_INT32, 0, INT32_MAX),
};

#define SPEC(name, kind, least, most)                                                              \
    {#name, kind, false, offsetof(struct slide_train_spec, name), least, most, NULL, 0, 0}
#define NEEDED(name, kind, least, most)                                                            \
    {#name, kind, true, offsetof(struct slide_train_spec, name), least, most, NULL, 0, 0}

static const struct slide_py_field spec_fields[] = {
    {.key = "model", .required = true},
    SPEC(rank, SLIDE_PY_INT, 0, INT32_MAX),
    SPEC(world, SLIDE_PY_INT, 1, INT32_MAX),
    SPEC(rendezvous, SLIDE_PY_STR, 0, 0),
    SPEC(agreement, SLIDE_PY_STR, 0, 0),
    SPEC(device, SLIDE_PY_STR, 0, 0),
    SPEC(device_index, SLIDE_PY_INT, 0, INT32_MAX),
    SPEC(bf16, SLIDE_PY_BOOL, 0, 0),
    {.key = "gradient_dtype",
     .kind = SLIDE_PY_CHOICE,
     .offset = offsetof(struct slide_train_spec, gradient_dtype),
     .choices = gradient_dtypes},
    {.key = "delivery",
     .kind = SLIDE_PY_CHOICE,
     .offset = offsetof(struct slide_train_spec, delivery),
     .choices = deliveries},
    {.key = "reduction",
     .kind = SLIDE_PY_CHOICE,
     .offset = offsetof(struct slide_train_spec, reduction),
     .choices = reductions},
    SPEC(threads, SLIDE_PY_INT, 0, SLIDE_PY_THREADS_MAX),
    SPEC(blas, SLIDE_PY_PATH, 0, 0),
    SPEC(nvidia, SLIDE_PY_PATH, 0, 0),
    NEEDED(max_tokens, SLIDE_PY_INT64, 1, INT32_MAX),
    NEEDED(max_seq, SLIDE_PY_INT32, 1, INT32_MAX),
    SPEC(micro_batches, SLIDE_PY_INT, 1, 1 << 20),
    {.key = "activations",
     .kind = SLIDE_PY_CHOICE,
     .offset = offsetof(struct slide_train_spec, activations),
     .choices = activations},
    {.key = "block_activations"},
    SPEC(device_budget, SLIDE_PY_UINT64, 0, INT64_MAX),
    SPEC(slots, SLIDE_PY_INT, 2, 1 << 16),
    SPEC(chunk_bytes, SLIDE_PY_UINT64, 1, 1 << 30),
    SPEC(head_rows, SLIDE_PY_INT32, 1, INT32_MAX),
    SPEC(overlap, SLIDE_PY_BOOL, 0, 0),
    SPEC(keep_gradients, SLIDE_PY_BOOL, 0, 0),
    SPEC(defer, SLIDE_PY_BOOL, 0, 0),
    SPEC(skip_nonfinite, SLIDE_PY_BOOL, 0, 0),
    SPEC(max_grad_norm, SLIDE_PY_DOUBLE, 0, 0),
    SPEC(debug_nonfinite, SLIDE_PY_BOOL, 0, 0),
    {.key = "pinning",
     .kind = SLIDE_PY_CHOICE,
     .offset = offsetof(struct slide_train_spec, pinning),
     .choices = pinnings},
    SPEC(timeout, SLIDE_PY_DOUBLE, 0, 1 << 30),
    SPEC(beta1, SLIDE_PY_DOUBLE, 0, 1),
    SPEC(beta2, SLIDE_PY_DOUBLE, 0, 1),
    SPEC(epsilon, SLIDE_PY_DOUBLE, 0, 0),
    SPEC(weight_decay, SLIDE_PY_DOUBLE, 0, 0),
};

static int read_model(PyObject *dict, struct slide_config *config, PyObject *keep)
{
    const char *type;
    if (slide_py_fields(dict, "spec: model", model_fields, COUNT(model_fields), config, keep))
        return -1;
    PyObject *name = slide_py_item(dict, "model_type", keep);
    PyObject *slides = name ? slide_py_item(dict, "layer_slides", keep) : NULL;
    if (!slides || slide_py_str(name, "spec: model: model_type", &type))
        return -1;
    if (strlen(type) >= sizeof config->model_type) {
        PyErr_Format(PyExc_ValueError, "spec: model: model_type: %.100R is too long", name);
        return -1;
    }
    strcpy(config->model_type, type);
    config->layer_slides = NULL;
    if (slides == Py_None)
        return 0;
    if (!PyBytes_Check(slides)) {
        PyErr_Format(PyExc_TypeError,
                     "spec: model: layer_slides: bytes or None are wanted, not %.100s",
                     Py_TYPE(slides)->tp_name);
        return -1;
    }
    if (PyBytes_GET_SIZE(slides) != config->layers) {
        PyErr_Format(PyExc_ValueError, "spec: model: layer_slides: %zd bytes for %d layers",
                     PyBytes_GET_SIZE(slides), config->layers);
        return -1;
    }
    for (int i = 0; i < config->layers; i++)
        if ((unsigned char)PyBytes_AS_STRING(slides)[i] > 1) {
            PyErr_Format(PyExc_ValueError, "spec: model: layer_slides: byte %d is not 0 or 1", i);
            return -1;
        }
    config->layer_slides = (uint8_t *)PyBytes_AS_STRING(slides); /* slide_model_init copies it */
    return 0;
}

/* A byte a block, the index of its policy in `activations`. */
static int read_blocks(PyObject *dict, struct slide_train_spec *spec, PyObject *keep)
{
    PyObject *blocks = slide_py_item(dict, "block_activations", keep);
    if (!blocks || blocks == Py_None)
        return PyErr_Occurred() ? -1 : 0;
    if (!PyBytes_Check(blocks)) {
        PyErr_Format(PyExc_TypeError, "spec: block_activations: bytes are wanted, not %.100s",
                     Py_TYPE(blocks)->tp_name);
        return -1;
    }
    if (PyBytes_GET_SIZE(blocks) != spec->config.layers) {
        PyErr_Format(PyExc_ValueError, "spec: block_activations: %zd bytes for %d layers",
                     PyBytes_GET_SIZE(blocks), spec->config.layers);
        return -1;
    }
    spec->block_activations = (const uint8_t *)PyBytes_AS_STRING(blocks); /* open copies it */
    return 0;
}

int slide_py_spec(PyObject *dict, struct slide_train_spec *spec, PyObject *keep)
{
    *spec = SLIDE_TRAIN_SPEC_INIT;
    if (slide_py_fields(dict, "spec", spec_fields, COUNT(spec_fields), spec, keep))
        return -1;
    PyObject *model = slide_py_item(dict, "model", keep);
    if (!model || read_model(model, &spec->config, keep))
        return -1;
    if (read_blocks(dict, spec, keep))
        return -1;
    /* FP32 throughout means FP32 on the wire too, unless somebody asked for something else. */
    if (!spec->bf16 && !slide_py_item(dict, "gradient_dtype", keep)) {
        if (PyErr_Occurred())
            return -1;
        spec->gradient_dtype = SLIDE_F32;
    }
    return 0;
}

/* ---- Part ---- */

#define PART(name, kind, most)                                                                     \
    {#name, kind, true, offsetof(struct slide_part, name), 0, most, NULL, 0, 0}

static const struct slide_py_field part_fields[] = {
    PART(name, SLIDE_PY_STR, 0),
    PART(path, SLIDE_PY_PATH, 0),
    PART(offset, SLIDE_PY_UINT64, INT64_MAX / 2), /* + 8 count is still an off_t */
    PART(count, SLIDE_PY_UINT64, INT64_MAX / 16),
    {.key = "dtype",
     .kind = SLIDE_PY_CHOICE,
     .required = true,
     .offset = offsetof(struct slide_part, dtype),
     .choices = file_dtypes},
};

/* The items of a sequence as a tuple of our own, kept by `keep`; a lone str or dict is a mistake.
 */
static PyObject *items_of(PyObject *sequence, const char *what, Py_ssize_t most, PyObject *keep)
{
    if (PyUnicode_Check(sequence) || PyDict_Check(sequence) || !PySequence_Check(sequence)) {
        PyErr_Format(PyExc_TypeError, "%s: a sequence of dicts is wanted, not %.100s", what,
                     Py_TYPE(sequence)->tp_name);
        return NULL;
    }
    PyObject *tuple = PySequence_Tuple(sequence);
    if (!tuple)
        return NULL;
    if (PyTuple_GET_SIZE(tuple) > most)
        PyErr_Format(PyExc_ValueError, "%s: %zd of them, at most %zd", what,
                     PyTuple_GET_SIZE(tuple), most);
    bool good = PyTuple_GET_SIZE(tuple) <= most && !PyList_Append(keep, tuple);
    Py_DECREF(tuple);
    return good ? tuple : NULL;
}

struct slide_part *slide_py_parts(PyObject *sequence, int *count, PyObject *keep)
{
    PyObject *items = items_of(sequence, "parts", INT32_MAX / 64, keep);
    if (!items)
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(items);
    struct slide_part *part = PyMem_Calloc((size_t)n + 1, sizeof *part);
    if (!part) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        char what[32];
        PyOS_snprintf(what, sizeof what, "part %zd", i);
        PyObject *dict = slide_py_dict(PyTuple_GET_ITEM(items, i), what, keep);
        if (!dict || slide_py_fields(dict, what, part_fields, COUNT(part_fields), &part[i], keep)) {
            PyMem_Free(part);
            return NULL;
        }
    }
    *count = (int)n;
    return part;
}

/* ---- MicroBatch ---- */

static const struct slide_py_field batch_fields[] = {
    {.key = "input_ids", .required = true, .offset = offsetof(struct slide_batch, ids)},
    {.key = "labels", .offset = offsetof(struct slide_batch, labels)},
    {.key = "positions", .offset = offsetof(struct slide_batch, positions)},
    {.key = "first", .offset = offsetof(struct slide_batch, first)},
};

int slide_py_batch(PyObject *mapping, const char *what, struct slide_batch *batch, PyObject *keep)
{
    PyObject *dict = slide_py_dict(mapping, what, keep);
    *batch = (struct slide_batch){0};
    if (!dict || slide_py_fields(dict, what, batch_fields, COUNT(batch_fields), batch, keep))
        return -1;
    for (size_t i = 0; i < COUNT(batch_fields); i++) {
        struct slide_py_array array;
        char name[64];
        PyObject *value = slide_py_item(dict, batch_fields[i].key, keep);
        if (!value && PyErr_Occurred())
            return -1;
        if (!value)
            continue;
        PyOS_snprintf(name, sizeof name, "%s: %s", what, batch_fields[i].key);
        if (slide_py_borrow(value, name, SLIDE_PY_I32, 2, false, &array))
            return -1;
        if (array.count < 1 || array.count > INT32_MAX) {
            PyErr_Format(PyExc_ValueError,
                         "%s: the shape is [%zd, %zd], 1 to 2^31 - 1 tokens "
                         "are wanted",
                         name, array.shape[0], array.shape[1]);
            return -1;
        }
        if (i == 0) {
            batch->rows = (int32_t)array.shape[0];
            batch->seq = (int32_t)array.shape[1];
        } else if (array.shape[0] != batch->rows || array.shape[1] != batch->seq) {
            PyErr_Format(PyExc_ValueError,
                         "%s: the shape is [%zd, %zd], that of input_ids [%d, %d]", name,
                         array.shape[0], array.shape[1], batch->rows, batch->seq);
            return -1;
        }
        *(const void **)((char *)batch + batch_fields[i].offset) = array.data;
    }
    return 0;
}

struct slide_batch *slide_py_batches(PyObject *sequence, int *count, PyObject *keep)
{
    PyObject *items = items_of(sequence, "batches", 1 << 20, keep);
    if (!items)
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(items);
    struct slide_batch *batch = PyMem_Calloc((size_t)n + 1, sizeof *batch);
    if (!batch) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        char what[32];
        PyOS_snprintf(what, sizeof what, "micro-batch %zd", i);
        if (slide_py_batch(PyTuple_GET_ITEM(items, i), what, &batch[i], keep)) {
            PyMem_Free(batch);
            return NULL;
        }
    }
    *count = (int)n;
    return batch;
}
