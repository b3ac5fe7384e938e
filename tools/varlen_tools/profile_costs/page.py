"""The page of a profile: how it was measured, the picture, and every measured batch."""

from functools import partial

from varlen_tools import html_page, pictures
from varlen_tools.profile_costs.picture import draw
from varlen_tools.profile_costs.profile import Profile
from varlen_tools.profile_costs.tables import BATCH_HEADINGS, BATCHES_TITLE, batch_rows


def render(profile: Profile) -> str:
    """Return the page."""
    costs = profile.costs
    measurement = costs.measurement
    cut = "" if measurement.is_complete else f", cut short after {costs.allowed_seconds:g} s"
    title = f"Cost of a batch of {profile.name}"
    return html_page.page(
        title,
        [
            html_page.paragraph(
                f"{len(measurement.batches)} batches measured in {measurement.seconds:.1f} s"
                f" on {costs.measured_at:%Y-%m-%d at %H:%M %Z}{cut}; the reference batch took"
                f" {measurement.spread:.2f} times as long in slow moments as in fast ones."
                f" The median error of the fitted costs is {profile.median_error():.1%}."
            ),
            pictures.embedded(partial(draw, profile), title),
            html_page.heading(BATCHES_TITLE.capitalize()),
            html_page.table(BATCH_HEADINGS, batch_rows(profile)),
            html_page.heading("Measured with"),
            html_page.table(["property", "value"], [list(item) for item in costs.key.items()]),
        ],
    )
