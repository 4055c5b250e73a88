/* The dict that Engine is opened with, key by key. An unknown key, a wrong type or a value out of
 * range is an error that names the key; a key that is absent keeps its default. */
#include <math.h>
#include <string.h>

#include "py/py.h"

int slide_py_int(PyObject *value, const char *key, long long low, long long high, long long *out)
{
    if (PyBool_Check(value) || !PyIndex_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s: an int is wanted, not %.100s", key,
                     Py_TYPE(value)->tp_name);
        return -1;
    }
    PyObject *number = PyNumber_Index(value);
    if (!number)
        return -1;
    int overflow;
    long long x = PyLong_AsLongLongAndOverflow(number, &overflow);
    Py_DECREF(number);
    if (x == -1 && PyErr_Occurred())
        return -1;
    if (overflow || x < low || x > high) {
        PyErr_Format(PyExc_ValueError, "%s: %R is not in %lld to %lld", key, value, low, high);
        return -1;
    }
    *out = x;
    return 0;
}

int slide_py_float(PyObject *value, const char *key, double *out)
{
    if (PyBool_Check(value) || (!PyFloat_Check(value) && !PyLong_Check(value))) {
        PyErr_Format(PyExc_TypeError, "%s: a float is wanted, not %.100s", key,
                     Py_TYPE(value)->tp_name);
        return -1;
    }
    *out = PyFloat_AsDouble(value);
    if (*out == -1.0 && PyErr_Occurred())
        return -1;
    if (!isfinite(*out)) {
        PyErr_Format(PyExc_ValueError, "%s: %R is not finite", key, value);
        return -1;
    }
    return 0;
}

int slide_py_text(PyObject *value, const char *key, const char **out)
{
    if (!PyUnicode_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s: a str is wanted, not %.100s", key,
                     Py_TYPE(value)->tp_name);
        return -1;
    }
    Py_ssize_t size;
    *out = PyUnicode_AsUTF8AndSize(value, &size);
    if (!*out)
        return -1;
    if (strlen(*out) != (size_t)size) {
        PyErr_Format(PyExc_ValueError, "%s: %R has a NUL character", key, value);
        return -1;
    }
    return 0;
}

int slide_py_dtype(PyObject *value, const char *key, enum slide_dtype *out)
{
    static const struct {
        const char *name;
        enum slide_dtype dtype;
    } names[] = {{"F32", SLIDE_F32},
                 {"BF16", SLIDE_BF16},
                 {"F16", SLIDE_F16},
                 {"float32", SLIDE_F32},
                 {"bfloat16", SLIDE_BF16}};
    const char *text;
    if (slide_py_text(value, key, &text))
        return -1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(names[i].name, text)) {
            *out = names[i].dtype;
            return 0;
        }
    PyErr_Format(PyExc_ValueError, "%s: unknown number format %R", key, value);
    return -1;
}

/* A field of a C struct and how to read it. */
enum field_kind { INT32, INT64, UINT64, INT, BOOL, FLAG32, DOUBLE, TEXT, DTYPE };

struct field {
    const char *key;
    enum field_kind kind;
    size_t offset;
    long long low, high;
};

static int read_bool(PyObject *value, const char *key, bool *out)
{
    if (!PyBool_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%s: True or False is wanted, not %.100s", key,
                     Py_TYPE(value)->tp_name);
        return -1;
    }
    *out = value == Py_True;
    return 0;
}

static int read_field(const struct field *f, PyObject *value, void *base)
{
    char *at = (char *)base + f->offset;
    long long number = 0;
    bool flag = false;
    switch (f->kind) {
    case INT32:
    case INT64:
    case UINT64:
    case INT:
        if (slide_py_int(value, f->key, f->low, f->high, &number))
            return -1;
        if (f->kind == INT32)
            *(int32_t *)at = (int32_t)number;
        else if (f->kind == INT64)
            *(int64_t *)at = number;
        else if (f->kind == UINT64)
            *(uint64_t *)at = (uint64_t)number;
        else
            *(int *)at = (int)number;
        return 0;
    case BOOL:
    case FLAG32:
        if (read_bool(value, f->key, &flag))
            return -1;
        if (f->kind == BOOL)
            *(bool *)at = flag;
        else
            *(int32_t *)at = flag;
        return 0;
    case DOUBLE:
        return slide_py_float(value, f->key, (double *)at);
    case TEXT:
        return slide_py_text(value, f->key, (const char **)at);
    case DTYPE:
        return slide_py_dtype(value, f->key, (enum slide_dtype *)at);
    }
    return -1;
}

/* Reads every key of dict that `fields` has; others are left for `other`, or are an error. */
static int read_dict(PyObject *dict, const char *what, const struct field *fields, size_t count,
                     void *base, int (*other)(const char *, PyObject *, void *), void *arg)
{
    PyObject *key, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(dict, &at, &key, &value)) {
        const char *name;
        size_t i = 0;
        if (slide_py_text(key, what, &name))
            return -1;
        while (i < count && strcmp(fields[i].key, name))
            i++;
        if (i < count ? read_field(&fields[i], value, base) : other(name, value, arg))
            return -1;
    }
    return 0;
}

#define CONFIG(key, kind, field, low, high)                                                        \
    {key, kind, offsetof(struct slide_config, field), low, high}
#define SPEC(key, kind, field, low, high)                                                          \
    {key, kind, offsetof(struct slide_train_spec, field), low, high}

static const struct field config_fields[] = {
    CONFIG("hidden", INT32, hidden, 0, INT32_MAX),
    CONFIG("layers", INT32, layers, 0, INT32_MAX),
    CONFIG("heads", INT32, heads, 0, INT32_MAX),
    CONFIG("kv_heads", INT32, kv_heads, 0, INT32_MAX),
    CONFIG("head_dim", INT32, head_dim, 0, INT32_MAX),
    CONFIG("inter", INT32, inter, 0, INT32_MAX),
    CONFIG("vocab", INT32, vocab, 0, INT32_MAX),
    CONFIG("rms_eps", DOUBLE, rms_eps, 0, 0),
    CONFIG("tied", FLAG32, tied, 0, 0),
    CONFIG("padding_idx", INT32, padding_idx, -1, INT32_MAX),
    CONFIG("qkv_bias", FLAG32, qkv_bias, 0, 0),
    CONFIG("o_bias", FLAG32, o_bias, 0, 0),
    CONFIG("mlp_bias", FLAG32, mlp_bias, 0, 0),
    CONFIG("sliding_window", INT32, sliding_window, 0, INT32_MAX),
    CONFIG("rope_theta", DOUBLE, rope_theta, 0, 0),
    CONFIG("rope_factor", DOUBLE, rope_factor, 0, 0),
    CONFIG("rope_low", DOUBLE, rope_low, 0, 0),
    CONFIG("rope_high", DOUBLE, rope_high, 0, 0),
    CONFIG("rope_original", INT32, rope_original, 0, INT32_MAX),
};

static const struct field spec_fields[] = {
    SPEC("rank", INT, rank, 0, INT32_MAX),
    SPEC("world", INT, world, 1, INT32_MAX),
    SPEC("rendezvous", TEXT, rendezvous, 0, 0),
    SPEC("agreement", TEXT, agreement, 0, 0),
    SPEC("device", TEXT, device, 0, 0),
    SPEC("device_index", INT, device_index, 0, INT32_MAX),
    SPEC("bf16", BOOL, bf16, 0, 0),
    SPEC("gradient_dtype", DTYPE, gradient_dtype, 0, 0),
    SPEC("threads", INT, threads, 0, 4096),
    SPEC("blas", TEXT, blas, 0, 0),
    SPEC("max_tokens", INT64, max_tokens, 1, INT32_MAX),
    SPEC("max_seq", INT32, max_seq, 1, INT32_MAX),
    SPEC("micro_batches", INT, micro_batches, 1, 1 << 20),
    SPEC("slots", INT, slots, 2, 1 << 16),
    SPEC("chunk_bytes", UINT64, chunk_bytes, 1, 1ll << 40),
    SPEC("head_rows", INT32, head_rows, 1, INT32_MAX),
    SPEC("overlap", BOOL, overlap, 0, 0),
    SPEC("keep_gradients", BOOL, keep_gradients, 0, 0),
    SPEC("timeout", DOUBLE, timeout, 0, 0),
    SPEC("beta1", DOUBLE, beta1, 0, 0),
    SPEC("beta2", DOUBLE, beta2, 0, 0),
    SPEC("epsilon", DOUBLE, epsilon, 0, 0),
    SPEC("weight_decay", DOUBLE, weight_decay, 0, 0),
};

struct target {
    struct slide_train_spec *spec;
    uint8_t *slides;
    Py_ssize_t slide_count;
};

static int config_other(const char *key, PyObject *value, void *arg)
{
    struct target *t = arg;
    struct slide_config *c = &t->spec->config;
    const char *text;
    if (!strcmp(key, "model_type")) {
        if (slide_py_text(value, key, &text))
            return -1;
        if (strlen(text) >= sizeof c->model_type) {
            PyErr_Format(PyExc_ValueError, "model_type: %R is too long", value);
            return -1;
        }
        strcpy(c->model_type, text);
        return 0;
    }
    if (!strcmp(key, "rope")) {
        static const char *const names[] = {"default", "linear", "llama3"};
        if (slide_py_text(value, key, &text))
            return -1;
        for (int i = 0; i < 3; i++)
            if (!strcmp(names[i], text)) {
                c->rope = (enum slide_rope_kind)i;
                return 0;
            }
        PyErr_Format(PyExc_ValueError, "rope: %R is not default, linear or llama3", value);
        return -1;
    }
    if (!strcmp(key, "layer_slides")) {
        if (value == Py_None)
            return 0;
        if (!PyBytes_Check(value)) {
            PyErr_SetString(PyExc_TypeError, "layer_slides: bytes or None are wanted");
            return -1;
        }
        t->slide_count = PyBytes_GET_SIZE(value);
        t->slides = PyMem_Malloc((size_t)t->slide_count + 1);
        if (!t->slides) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(t->slides, PyBytes_AS_STRING(value), (size_t)t->slide_count);
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "the model has an unknown key '%s'", key);
    return -1;
}

static int spec_other(const char *key, PyObject *value, void *arg)
{
    struct target *t = arg;
    const char *text;
    if (!strcmp(key, "activations")) {
        if (slide_py_text(value, key, &text))
            return -1;
        t->spec->keep_activations = !strcmp(text, "keep");
        if (!t->spec->keep_activations && strcmp(text, "recompute")) {
            PyErr_Format(PyExc_ValueError, "activations: %R is not recompute or keep", value);
            return -1;
        }
        return 0;
    }
    if (!strcmp(key, "model")) {
        if (!PyDict_Check(value)) {
            PyErr_SetString(PyExc_TypeError, "model: a dict is wanted");
            return -1;
        }
        return read_dict(value, "model", config_fields,
                         sizeof config_fields / sizeof *config_fields, &t->spec->config,
                         config_other, t);
    }
    PyErr_Format(PyExc_TypeError, "Engine has no setting '%s'", key);
    return -1;
}

int slide_py_spec(PyObject *dict, struct slide_train_spec *spec, uint8_t **slides)
{
    struct target t = {.spec = spec};
    *spec = SLIDE_TRAIN_SPEC_INIT;
    spec->config.padding_idx = -1;
    *slides = NULL;
    if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_TypeError, "Engine is opened with a dict, not %.100s",
                     Py_TYPE(dict)->tp_name);
        return -1;
    }
    if (!PyDict_GetItemString(dict, "model")) {
        PyErr_SetString(PyExc_TypeError, "Engine needs the key 'model'");
        return -1;
    }
    int failed = read_dict(dict, "spec", spec_fields, sizeof spec_fields / sizeof *spec_fields,
                           spec, spec_other, &t);
    /* FP32 throughout means FP32 on the wire too, unless somebody asked for something else. */
    if (!failed && !spec->bf16 && !PyDict_GetItemString(dict, "gradient_dtype"))
        spec->gradient_dtype = SLIDE_F32;
    if (!failed && t.slides && t.slide_count != spec->config.layers) {
        PyErr_Format(PyExc_ValueError, "layer_slides has %zd entries for %d layers", t.slide_count,
                     spec->config.layers);
        failed = -1;
    }
    if (failed) {
        PyMem_Free(t.slides);
        return -1;
    }
    spec->config.layer_slides = t.slides;
    *slides = t.slides;
    return 0;
}
