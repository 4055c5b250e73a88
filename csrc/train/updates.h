/* Updates that wait: this rank's reduced gradients stand in the gradient plane until a thread gets
 * round to them, lowest unit first, for the next forward needs it first. Where a step may be
 * dropped or scaled the gate is closed until its norm is known.
 * Threads: add by the route's collector, the rest by the driver. Blocks: settle and drain, until
 * the updates are done. */
#ifndef SLIDE_TRAIN_UPDATES_H
#define SLIDE_TRAIN_UPDATES_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "optim/adamw.h"

struct slide_train;
struct slide_updates;

/* gated: every step's updates wait for slide_updates_release. */
int slide_updates_open(struct slide_updates **updates, struct slide_train *train, bool gated,
                       struct slide_err *err);
void slide_updates_close(struct slide_updates *updates);
/* A step begins whose gradients are for AdamW with these numbers, by (without, with decay). Updates
 * of the step before may still be under way. */
void slide_updates_begin(struct slide_updates *updates, const struct slide_adamw adam[2]);
/* Unit's gradient stands in the plane, whole. */
void slide_updates_add(struct slide_updates *updates, int unit);
/* All of the step's gradients are there: they are scaled and applied; or forgotten. */
void slide_updates_release(struct slide_updates *updates, float scale);
void slide_updates_drop(struct slide_updates *updates);
/* Until nothing waits on this rank. */
int slide_updates_drain(struct slide_updates *updates, struct slide_err *err);

#endif
