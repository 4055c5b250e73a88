/* Registers with the device what it copies from and to: the `hi` planes, in pieces on unit borders,
 * this rank's ring of staging places, and the gradient plane where gradients go there directly.
 * Unregistered memory works as well, for the driver copies it through a pinned buffer of its own,
 * but more slowly and without overlap; so a refusal is a warning unless the caller wants it to be
 * an error. Called by train.c once the segment's pages are there. */
#include "base/log.h"
#include "base/mem.h"
#include "train/rank.h"

#define PIECE_MAX ((size_t)64 << 30) /* one registration of 512 GiB fails on recent drivers */

static int pin(struct slide_train *train, void *at, size_t bytes, struct slide_err *err)
{
    struct slide_pins *pins = &train->pins;
    if (slide_device_pin(train->device, at, bytes, err))
        return -1;
    pins->piece[pins->pieces].at = at;
    pins->piece[pins->pieces++].bytes = bytes;
    pins->bytes += bytes;
    return 0;
}

static int pin_all(struct slide_train *train, struct slide_err *err)
{
    const struct slide_layout *layout = &train->layout;
    size_t offset, bytes;
    if (layout->staging_bytes &&
        pin(train, slide_host_staging(&train->host, train->spec.rank), layout->staging_bytes, err))
        return -1;
    static const enum slide_plane planes[] = {SLIDE_PLANE_HI, SLIDE_PLANE_GRAD};
    for (int i = 0; i < (slide_reduce_direct(layout, train->on_device) ? 2 : 1); i++)
        for (int unit = 0; unit < layout->units;) {
            unit = slide_layout_piece(layout, planes[i], unit, PIECE_MAX, &offset, &bytes);
            if (pin(train, slide_host_at(&train->host, offset), bytes, err))
                return -1;
        }
    return 0;
}

int slide_pins_open(struct slide_train *train, struct slide_err *err)
{
    struct slide_err why = SLIDE_ERR_INIT;
    enum slide_pinning pinning = train->spec.pinning;
    if (pinning == SLIDE_PIN_NEVER)
        return 0;
    train->pins.piece =
        slide_mem_array((uint64_t)train->layout.units * 2 + 1, sizeof *train->pins.piece, err);
    if (!train->pins.piece)
        return -1;
    if (!pin_all(train, pinning == SLIDE_PIN_ALWAYS ? err : &why))
        return 0;
    if (pinning == SLIDE_PIN_ALWAYS)
        return -1;
    slide_log(train->spec.rank, SLIDE_LOG_WARN,
              "%s (%s); %.1f GiB are pinned, the rest is copied more slowly", why.text,
              why.notes ? why.note[0] : "", (double)train->pins.bytes / (1u << 30));
    return 0;
}

void slide_pins_close(struct slide_train *train)
{
    for (int i = 0; i < train->pins.pieces; i++)
        slide_device_unpin(train->device, train->pins.piece[i].at, train->pins.piece[i].bytes);
    slide_mem_free(train->pins.piece);
    train->pins = (struct slide_pins){0};
}
