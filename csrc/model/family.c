/* Looks families up, checks a config and answers what its dimensions are. All products that other
 * layers form from a config are bounded here once, so that nobody else has to check them. Called
 * by train/ when a model is opened, then by whoever walks the tables. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "model/model.h"

/* No decoder has more; it keeps arrays by unit small whatever a damaged config says. */
#define LAYERS_MAX 65536
/* Elements of a model: 16 bytes each, padding included, stay far from 2^63. */
#define PARAMS_MAX 0x1p58

extern const struct slide_family slide_family_llama, slide_family_mistral, slide_family_qwen2,
    slide_family_qwen3;

const struct slide_family *const slide_families[] = {
    &slide_family_llama, &slide_family_mistral, &slide_family_qwen2, &slide_family_qwen3, NULL,
};

const struct slide_family *slide_family_find(const char *model_type, struct slide_err *err)
{
    char known[256] = "";
    for (int i = 0; slide_families[i]; i++) {
        if (!strcmp(slide_families[i]->model_type, model_type))
            return slide_families[i];
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "",
                 slide_families[i]->model_type);
    }
    slide_err_set(err, SLIDE_EINVAL, "model_type \"%s\" is not supported; these are: %s",
                  model_type, known);
    return NULL;
}

/* ---- checks of a config ---- */

static int positive(const char *name, int64_t value, int64_t most, struct slide_err *err)
{
    if (value >= 1 && value <= most)
        return 0;
    return slide_err_set(err, SLIDE_EINVAL, "model: %s is %lld, must be 1 to %lld", name,
                         (long long)value, (long long)most);
}

/* The value is used in FP32: it must be a normal number there. False for NaN. */
static int positive_float(const char *name, double value, struct slide_err *err)
{
    if (value >= (double)FLT_MIN && value <= (double)FLT_MAX)
        return 0;
    return slide_err_set(err, SLIDE_EINVAL, "model: %s is %g, must be a positive FP32 number", name,
                         value);
}

static int check_shapes(const struct slide_config *c, struct slide_err *err)
{
    const int64_t most = INT32_MAX;
    if (positive("hidden", c->hidden, most, err) ||
        positive("layers", c->layers, LAYERS_MAX, err) || positive("heads", c->heads, most, err) ||
        positive("kv_heads", c->kv_heads, most, err) ||
        positive("head_dim", c->head_dim, most, err) || positive("vocab", c->vocab, most, err) ||
        positive("inter", c->inter, most / 2, err))
        return -1;
    if (c->heads % c->kv_heads)
        return slide_err_set(err, SLIDE_EINVAL, "model: %d heads are not a multiple of %d kv_heads",
                             c->heads, c->kv_heads);
    if (c->padding_idx < -1 || c->padding_idx >= c->vocab)
        return slide_err_set(err, SLIDE_EINVAL, "model: padding_idx is %d, the vocabulary has %d",
                             c->padding_idx, c->vocab);
    if (c->head_dim % 2)
        return slide_err_set(err, SLIDE_EINVAL,
                             "model: head_dim is %d; rotary embeddings need an even one",
                             c->head_dim);
    /* The widest dimension made of others, so that all of them fit an int32_t. */
    return positive("heads + 2 kv_heads", (int64_t)c->heads + 2 * (int64_t)c->kv_heads,
                    most / c->head_dim, err);
}

static int check_window(const struct slide_config *c, struct slide_err *err)
{
    if (c->sliding_window < 0)
        return slide_err_set(err, SLIDE_EINVAL, "model: sliding_window is %d, must be >= 0",
                             c->sliding_window);
    for (int i = 0; c->layer_slides && c->sliding_window == 0 && i < c->layers; i++)
        if (c->layer_slides[i])
            return slide_err_set(err, SLIDE_EINVAL,
                                 "model: layer %d slides, but sliding_window is 0", i);
    return 0;
}

static int check_rope(const struct slide_config *c, struct slide_err *err)
{
    if (positive_float("rope_theta", c->rope_theta, err))
        return -1;
    switch (c->rope) {
    case SLIDE_ROPE_DEFAULT:
        return 0;
    case SLIDE_ROPE_LINEAR:
        return positive_float("rope_factor", c->rope_factor, err);
    case SLIDE_ROPE_LLAMA3:
        if (positive_float("rope_factor", c->rope_factor, err) ||
            positive_float("rope_low", c->rope_low, err) ||
            positive_float("rope_high", c->rope_high, err) ||
            positive("rope_original", c->rope_original, INT32_MAX, err))
            return -1;
        if (c->rope_high - c->rope_low >= (double)FLT_MIN)
            return 0;
        return slide_err_set(err, SLIDE_EINVAL,
                             "model: rope_high is %g, must be above rope_low, %g", c->rope_high,
                             c->rope_low);
    }
    return slide_err_set(err, SLIDE_EINVAL, "model: rope kind %d is unknown", (int)c->rope);
}

/* A bias that the family's tables have no place for would be left out in silence. */
static int check_biases(const struct slide_model *model, struct slide_err *err)
{
    static const struct {
        enum slide_cond cond;
        const char *name;
    } bias[] = {{SLIDE_IF_QKV_BIAS, "qkv_bias"},
                {SLIDE_IF_O_BIAS, "o_bias"},
                {SLIDE_IF_MLP_BIAS, "mlp_bias"}};
    const struct slide_unit_table *table = &model->family->unit[SLIDE_UNIT_BLOCK];
    for (int i = 0; i < 3; i++) {
        int w = 0;
        while (w < table->weights && table->weight[w].cond != bias[i].cond)
            w++;
        if (slide_model_has(model, bias[i].cond) && w == table->weights)
            return slide_err_set(err, SLIDE_EINVAL, "model: %s has no %s",
                                 model->family->model_type, bias[i].name);
    }
    return 0;
}

/* Every unit's elements together, in double: exact enough for a bound with this much slack. */
static int check_size(const struct slide_model *model, struct slide_err *err)
{
    double total = 0;
    for (int kind = 0; kind < SLIDE_UNIT_KINDS; kind++) {
        const struct slide_unit_table *table = &model->family->unit[kind];
        for (int w = 0; w < table->weights; w++) {
            if (!slide_model_has(model, table->weight[w].cond))
                continue;
            total += (double)slide_model_rows(model, &table->weight[w]) *
                     slide_model_dim(model, table->weight[w].cols) *
                     (kind == SLIDE_UNIT_BLOCK ? model->config.layers : 1);
        }
    }
    if (total <= PARAMS_MAX)
        return 0;
    return slide_err_set(err, SLIDE_EINVAL, "model: %.3g parameters are more than can be addressed",
                         total);
}

int slide_model_init(struct slide_model *model, const struct slide_config *config,
                     struct slide_err *err)
{
    *model = (struct slide_model){0};
    if (!memchr(config->model_type, 0, sizeof config->model_type))
        return slide_err_set(err, SLIDE_EINVAL, "model: model_type has no end");
    const struct slide_family *family = slide_family_find(config->model_type, err);
    if (!family || check_shapes(config, err) || positive_float("rms_eps", config->rms_eps, err) ||
        check_window(config, err) || check_rope(config, err))
        return -1;
    struct slide_model m = {.family = family, .config = *config, .units = config->layers + 2};
    m.config.layer_slides = NULL;
    if (check_biases(&m, err) || check_size(&m, err))
        return -1;
    if (config->layer_slides) {
        m.config.layer_slides = slide_mem_array((uint64_t)config->layers, 1, err);
        if (!m.config.layer_slides)
            return -1;
        memcpy(m.config.layer_slides, config->layer_slides, (size_t)config->layers);
    }
    *model = m;
    return 0;
}

void slide_model_fini(struct slide_model *model)
{
    slide_mem_free(model->config.layer_slides);
    *model = (struct slide_model){0};
}

/* ---- questions ---- */

enum slide_unit_kind slide_model_kind(const struct slide_model *model, int unit)
{
    if (unit == 0)
        return SLIDE_UNIT_EMBED;
    return unit == model->units - 1 ? SLIDE_UNIT_HEAD : SLIDE_UNIT_BLOCK;
}

const struct slide_unit_table *slide_model_table(const struct slide_model *model, int unit)
{
    return &model->family->unit[slide_model_kind(model, unit)];
}

int32_t slide_model_dim(const struct slide_model *model, enum slide_dim dim)
{
    const struct slide_config *c = &model->config;
    switch (dim) {
    case SLIDE_DIM_ONE:
        return 1;
    case SLIDE_DIM_HIDDEN:
        return c->hidden;
    case SLIDE_DIM_VOCAB:
        return c->vocab;
    case SLIDE_DIM_HEAD:
        return c->head_dim;
    case SLIDE_DIM_Q:
        return c->heads * c->head_dim;
    case SLIDE_DIM_KV:
        return c->kv_heads * c->head_dim;
    case SLIDE_DIM_QKV:
        return (c->heads + 2 * c->kv_heads) * c->head_dim;
    case SLIDE_DIM_INTER:
        return c->inter;
    case SLIDE_DIM_INTER2:
        return 2 * c->inter;
    case SLIDE_DIM_COUNT:
        break;
    }
    return 0;
}

bool slide_model_has(const struct slide_model *model, enum slide_cond cond)
{
    const struct slide_config *c = &model->config;
    switch (cond) {
    case SLIDE_ALWAYS:
        return true;
    case SLIDE_IF_QKV_BIAS:
        return c->qkv_bias;
    case SLIDE_IF_O_BIAS:
        return c->o_bias;
    case SLIDE_IF_MLP_BIAS:
        return c->mlp_bias;
    case SLIDE_IF_UNTIED:
        return !c->tied;
    }
    return false;
}

int32_t slide_model_window(const struct slide_model *model, int unit)
{
    const struct slide_config *c = &model->config;
    if (slide_model_kind(model, unit) != SLIDE_UNIT_BLOCK)
        return 0;
    return !c->layer_slides || c->layer_slides[unit - 1] ? c->sliding_window : 0;
}

int64_t slide_model_rows(const struct slide_model *model, const struct slide_weight *weight)
{
    int64_t rows = 0;
    for (int p = 0; p < weight->parts; p++)
        rows += slide_model_dim(model, weight->part[p].rows);
    return rows;
}

/* ---- rotary frequencies ---- */

/* Llama 3's scaling of one frequency: long waves are stretched by `factor`, short ones stay, those
 * between are mixed (models.md 1.2). Each step rounds to FP32, and a division of a number by a
 * tensor is a product with its reciprocal, as in the reference. */
static float llama3(const struct slide_config *c, float freq)
{
    const float pi2 = (float)(2 * 3.14159265358979323846);
    float factor = (float)c->rope_factor;
    float wave = 1.0f / freq * pi2;
    if (wave > (float)(c->rope_original / c->rope_low))
        return freq / factor;
    if (wave < (float)(c->rope_original / c->rope_high))
        return freq;
    float turns = 1.0f / wave * (float)c->rope_original;
    float smooth = (turns - (float)c->rope_low) / (float)(c->rope_high - c->rope_low);
    float stretched = (1.0f - smooth) * freq / factor, kept = smooth * freq;
    return stretched + kept;
}

void slide_model_rope(const struct slide_model *model, float *inv_freq)
{
    const struct slide_config *c = &model->config;
    for (int i = 0; i < c->head_dim / 2; i++) {
        /* The power is rounded once, from double: what a correct powf gives. PyTorch's own is up to
         * 1 ulp off that, differently on different CPUs. */
        float exponent = (float)(2 * i) / (float)c->head_dim;
        float power = (float)pow((double)(float)c->rope_theta, (double)exponent);
        float freq = 1.0f / power;
        if (c->rope == SLIDE_ROPE_LINEAR)
            freq /= (float)c->rope_factor;
        else if (c->rope == SLIDE_ROPE_LLAMA3)
            freq = llama3(c, freq);
        inv_freq[i] = freq;
    }
}
