"""An HTML page around the picture: what was measured, on what, and how to read it."""

from html import escape

from varlen_tools.profile_costs.picture import draw
from varlen_tools.profile_costs.points import Profile

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff }
body { max-width: 90rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { text-align: left; padding: .2rem .9rem; border-bottom: 1px solid #ddd; overflow-wrap: anywhere }
figure { margin: 1.5rem 0; overflow-x: auto }
"""


def render(profile: Profile) -> str:
    """Return the page."""
    costs = profile.costs
    measurement = costs.measurement
    rows = "\n".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in costs.key.items()
    )
    heading = f"What a batch of {profile.name} costs"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(heading)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(heading)}</h1>
<p>{len(measurement.batches)} batches measured in {measurement.seconds:.1f} s
on {costs.measured_at:%Y-%m-%d at %H:%M} {costs.measured_at:%Z}{_completeness(profile)};
the reference batch took {measurement.spread:.2f} times as long in slow moments as in fast ones.
Point at a cell or a dot to read more.</p>
<figure>
{draw(profile)}
</figure>
<p>The fitted costs are off by {profile.median_error():.1%} in the median of the measured batches.</p>
<h2>Measured under</h2>
<table>
{rows}
</table>
</body>
</html>
"""


def _completeness(profile: Profile) -> str:
    if profile.costs.measurement.is_complete:
        return ""
    return f", cut short after {profile.costs.allowed_seconds:g} s"
