/* Full delivery: each rank copies whole units from the `hi` plane over its own link. The plane is
 * in the format of the compute already, so nothing is converted in a step. */
#include "base/fault.h"
#include "route/route.h"

int slide_deliver_full(struct slide_host *host, int unit, uint32_t updates, void *slot,
                       struct slide_lane *lane, double *waited, struct slide_err *err)
{
    const struct slide_layout *layout = host->layout;
    const struct slide_unit *u = &layout->unit[unit];
    double start = slide_time();
    if (slide_host_wait_updates(host, unit, updates, &host->peers, err) ||
        slide_fault("fetch", host->rank, err))
        return -1;
    *waited += slide_time() - start;
    size_t bytes = u->count * slide_layout_plane_size(layout, SLIDE_PLANE_HI);
    if (slide_copy(lane, slot, slide_host_at(host, u->plane[SLIDE_PLANE_HI]), bytes, SLIDE_COPY_H2D,
                   err))
        return slide_err_note(err, "while fetching unit %d", unit);
    return 0;
}
