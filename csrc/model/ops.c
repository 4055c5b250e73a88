/* What an op costs and keeps, told from its kind and its dimensions alone: the one place, with
 * pipe/program.c, that knows the kinds of ops. Called by the memory plan, the recompute of a unit
 * and whoever reports FLOPs. */
#include "model/model.h"

int64_t slide_op_aux(const struct slide_model *model, const struct slide_op *op)
{
    const struct slide_config *c = &model->config;
    switch (op->kind) {
    case SLIDE_OP_NORM:
        return 1; /* rstd */
    case SLIDE_OP_QKNORM:
        return (int64_t)c->heads + c->kv_heads; /* rstd of each head */
    case SLIDE_OP_ATTN:
        return c->heads; /* log-sum-exp of each row of scores */
    default:
        return 0;
    }
}

/* Pairs of query and key that causal attention over `seq` tokens visits. */
static double pairs(int32_t seq, int32_t window)
{
    double n = seq, w = window > 0 && window < seq ? window : seq;
    return w * (w + 1) / 2 + (n - w) * w;
}

/* Matrix products and attention only; norms, rotation and SwiGLU are bound by memory and belong to
 * no FLOP count in use. Both products of attention, scores and values, cover the visible pairs. */
double slide_unit_flops(const struct slide_model *model, int unit, int32_t seq)
{
    const struct slide_unit_table *table = slide_model_table(model, unit);
    double flops = 0;
    for (int i = 0; i < table->ops; i++) {
        const struct slide_op *op = &table->op[i];
        double in = slide_model_dim(model, table->value[op->in].width);
        double out = slide_model_dim(model, table->value[op->out].width);
        if (op->kind == SLIDE_OP_LINEAR || op->kind == SLIDE_OP_LOSS)
            flops += 2 * in * out * seq;
        else if (op->kind == SLIDE_OP_ATTN)
            flops += 4 * out * pairs(seq, slide_model_window(model, unit));
    }
    return flops;
}

int slide_unit_recompute_end(const struct slide_model *model, int unit)
{
    const struct slide_unit_table *table = slide_model_table(model, unit);
    int end = table->ops;
    while (end > 0 && !table->value[table->op[end - 1].out].keep &&
           slide_op_aux(model, &table->op[end - 1]) == 0)
        end--;
    return end;
}

const char *slide_activations_name(enum slide_activations policy)
{
    static const char *const name[SLIDE_ACT_COUNT] = {"recompute", "selective", "keep", "offload"};
    return name[policy];
}

bool slide_value_stays(const struct slide_model *model, int unit, int value,
                       enum slide_activations policy)
{
    const struct slide_unit_table *table = slide_model_table(model, unit);
    if (policy != SLIDE_ACT_SELECTIVE)
        return policy == SLIDE_ACT_KEEP;
    for (int i = 0; i < table->ops; i++) /* who made it; what works in place comes later */
        if (table->op[i].out == value)
            return table->op[i].kind == SLIDE_OP_LINEAR || table->op[i].kind == SLIDE_OP_ATTN;
    return false;
}

bool slide_op_repeats(const struct slide_model *model, int unit, int op,
                      enum slide_activations policy)
{
    const struct slide_unit_table *table = slide_model_table(model, unit);
    return op < slide_unit_recompute_end(model, unit) &&
           !slide_value_stays(model, unit, table->op[op].out, policy);
}
