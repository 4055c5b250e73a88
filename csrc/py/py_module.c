/* The module `slidedp._slidedp`: multi-phase initialisation, module state, errors as exceptions.
 * There is no Python object outside the state, so importing twice makes two independent modules. */
#include "py/py.h"

#include <string.h>

struct slide_py_state *slide_py_state_of(PyObject *module)
{
    return PyModule_GetState(module);
}

PyObject *slide_py_text(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
}

/* Failing to add a note is no reason to lose the error. */
static void add_note(PyObject *error, const char *text)
{
    PyObject *note = slide_py_text(text);
    PyObject *result = note ? PyObject_CallMethod(error, "add_note", "O", note) : NULL;
    if (!result)
        PyErr_Clear();
    Py_XDECREF(result);
    Py_XDECREF(note);
}

PyObject *slide_py_raise(struct slide_py_state *state, const struct slide_err *err)
{
    if (PyErr_Occurred())
        return NULL;
    PyObject *class = err->code > SLIDE_OK && err->code < SLIDE_CODE_COUNT
                          ? state->error_class[err->code]
                          : PyExc_SystemError;
    PyObject *text = slide_py_text(err->code > SLIDE_OK ? err->text : "failed without a cause");
    if (!text)
        return NULL;
    /* OSError(errno, text) becomes FileNotFoundError and so on by itself. */
    bool os = err->os && PyType_IsSubtype((PyTypeObject *)class, (PyTypeObject *)PyExc_OSError);
    PyObject *error = os ? PyObject_CallFunction(class, "iO", err->os, text)
                         : PyObject_CallFunctionObjArgs(class, text, NULL);
    Py_DECREF(text);
    if (!error)
        return NULL;
    for (int i = 0; i < err->notes; i++)
        add_note(error, err->note[i]);
    if (err->rank >= 0) {
        char note[32];
        PyOS_snprintf(note, sizeof note, "on rank %d", err->rank);
        add_note(error, note);
    }
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_DECREF(error);
    return NULL;
}

static int module_exec(PyObject *module)
{
    struct slide_py_state *state = slide_py_state_of(module);
    PyObject *builtins = PyImport_ImportModule("builtins");
    if (!builtins)
        return -1;
#define X(code, python, text)                                                                      \
    if (!(state->error_class[code] = PyObject_GetAttrString(builtins, python)))                    \
        goto fail;
#include "base/err.def"
#undef X
    Py_CLEAR(builtins);
    if (slide_py_numpy_init())
        return -1;
    state->engine_type =
        (PyTypeObject *)PyType_FromModuleAndSpec(module, &slide_py_engine_spec, NULL);
    if (!state->engine_type || PyModule_AddType(module, state->engine_type))
        return -1;
    return PyModule_AddStringConstant(module, "__version__", SLIDE_VERSION);
fail:
    Py_XDECREF(builtins);
    return -1;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct slide_py_state *state = slide_py_state_of(module);
    Py_VISIT(state->engine_type);
    for (int i = 0; i < SLIDE_CODE_COUNT; i++)
        Py_VISIT(state->error_class[i]);
    return 0;
}

static int module_clear(PyObject *module)
{
    struct slide_py_state *state = slide_py_state_of(module);
    Py_CLEAR(state->engine_type);
    for (int i = 0; i < SLIDE_CODE_COUNT; i++)
        Py_CLEAR(state->error_class[i]);
    return 0;
}

static void module_free(void *module)
{
    slide_py_pools_free(slide_py_state_of(module));
    module_clear(module);
}

#define FUNCTION(name, flags, signature, doc)                                                      \
    {#name, (PyCFunction)(void (*)(void))slide_py_##name, flags,                                   \
     #name "($module" signature ")\n--\n\n" doc}

static PyMethodDef methods[] = {
    FUNCTION(env, METH_VARARGS | METH_KEYWORDS, ", blas='', nvidia=''",
             "What this installation finds and uses."),
    FUNCTION(devices, METH_VARARGS | METH_KEYWORDS, ", nvidia=''",
             "How many devices of each backend can be used."),
    FUNCTION(model_types, METH_NOARGS, "", "The model_types that work."),
    FUNCTION(adamw, METH_VARARGS | METH_KEYWORDS,
             ", planes, grad, *, lr, beta1, beta2, epsilon, weight_decay, step, isa='', threads=1, "
             "chunk=0",
             "AdamW on planes, in place; returns the number of non-finite gradients."),
    FUNCTION(triad, METH_VARARGS | METH_KEYWORDS, ", a, b, c, threads=1",
             "a = b + 3 c, the STREAM triad, with ordinary stores."),
    FUNCTION(kernel, METH_VARARGS | METH_KEYWORDS, ", name, dtype, args, threads=1, device='cpu'",
             "Runs one kernel, gemm or attention of a backend on NumPy arrays."),
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "slidedp._slidedp",
    .m_doc = "Host state, streaming pipeline, reduction routes, CPU optimizer.",
    .m_size = sizeof(struct slide_py_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__slidedp(void)
{
    return PyModuleDef_Init(&definition);
}
