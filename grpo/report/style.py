"""The look of the report page: one style sheet, light and dark."""

from __future__ import annotations

from grpo.report.charts import PALETTE


def _variables(theme: int) -> str:
    return " ".join(f"--{role}: {colors[theme]};" for role, colors in PALETTE.items())


STYLE = f"""
:root {{ color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; {_variables(0)} }}
@media (prefers-color-scheme: dark) {{
  :root {{ --page: #0f1216; --card: #171b21; {_variables(1)} }}
}}
* {{ box-sizing: border-box; }}
body {{
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}}
main {{ max-width: 1240px; margin: 0 auto; padding: 40px 28px 56px; }}
h1 {{ margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -0.02em; }}
h2 {{ margin: 44px 0 12px; font-size: 19px; letter-spacing: -0.01em; }}
h3 {{ margin: 0; font-size: 14px; font-weight: 650; }}
p {{ margin: 0; }}
i {{ font-style: normal; color: var(--gray); }}
header p, .note, figcaption p, footer {{ color: var(--muted); }}
header p {{ margin-top: 6px; }}
h2 + .note {{ margin: -8px 0 14px; font-size: 14px; }}
.up {{ --tone: var(--green); }}
.down {{ --tone: var(--red); }}
.warn {{ --tone: var(--amber); }}

.tiles {{
  display: flex; flex-wrap: wrap; gap: 1px; margin-top: 26px; overflow: hidden;
  background: var(--line); border: 1px solid var(--line); border-radius: 12px;
}}
.tile {{
  display: flex; flex-direction: column; flex: 1 1 auto;
  padding: 16px 20px; background: var(--card);
}}
.tile .label {{ color: var(--muted); font-size: 13px; }}
.tile .value {{
  font-size: 27px; font-weight: 650; line-height: 1.3; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; white-space: nowrap;
}}
.tile .from {{ color: var(--muted); font-weight: 400; }}
.tile .detail {{ color: var(--tone, var(--muted)); font-size: 13px; min-height: 1.5em; }}
.notices {{
  margin: 14px 0 0; padding: 10px 20px 10px 36px; border-radius: 10px; font-size: 14px;
  background: color-mix(in srgb, var(--amber) 12%, var(--card));
}}

.charts {{ display: grid; gap: 16px; }}
.charts.wide {{ grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); }}
.charts.small {{ grid-template-columns: repeat(auto-fill, minmax(min(340px, 100%), 1fr)); }}
figure, .group, .card {{
  margin: 0; padding: 16px 18px; background: var(--card);
  border: 1px solid var(--line); border-radius: 12px;
}}
figure {{ display: flex; flex-direction: column; justify-content: space-between; }}
figcaption p {{ font-size: 12.5px; line-height: 1.4; margin: 2px 0 6px; }}
figure svg {{ display: block; width: 100%; height: auto; }}
figure svg text {{ font-family: inherit !important; font-variant-numeric: tabular-nums; }}

.samples .row {{
  display: grid; gap: 14px; margin-bottom: 22px;
  grid-template-columns: repeat(var(--columns), minmax(0, 1fr));
}}
.samples .row:first-child {{ margin-bottom: 10px; }}
.when {{ font-weight: 650; font-size: 14px; }}
pre {{
  margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}}
.prompt {{ margin-bottom: 8px; }}
.prompt pre {{
  font-family: inherit; font-size: 14px; font-weight: 500; max-height: 9em; overflow: auto;
}}
.answer {{ color: var(--muted); font-size: 13px; }}
.answer b {{ color: var(--ink); }}
.card {{ border-top: 3px solid var(--tone, var(--line)); padding: 12px 16px 14px; }}
.card.empty {{ background: none; border: 1px dashed var(--line); }}
.card .prompt {{ padding-bottom: 8px; border-bottom: 1px solid var(--line); }}
.completion {{ max-height: 22em; overflow: auto; }}
.badge {{
  display: inline-block; margin: 0 6px 8px 0; padding: 1px 9px; border-radius: 99px;
  font-size: 12px; font-weight: 600; font-variant-numeric: tabular-nums;
  color: var(--tone, var(--muted));
  background: color-mix(in srgb, var(--tone, var(--gray)) 14%, var(--card));
}}

.groups {{ columns: 3 340px; column-gap: 16px; }}
.group {{ break-inside: avoid; margin-bottom: 16px; }}
table {{ width: 100%; border-collapse: collapse; font-size: 13px; }}
th {{ font-weight: 400; text-align: left; color: var(--muted); vertical-align: top; }}
td {{ text-align: right; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 0 4px 8px; border-top: 1px solid var(--line); }}
th:first-child {{ padding-left: 0; }}
.group h3 {{ margin-bottom: 8px; }}
details {{ margin-top: 40px; }}
summary {{ cursor: pointer; font-size: 14px; font-weight: 650; margin-bottom: 12px; }}
.metrics thead th {{ text-align: right; border: 0; }}
footer {{ margin-top: 44px; padding-top: 14px; border-top: 1px solid var(--line); }}
footer {{ font-size: 13px; }}
@media (max-width: 720px) {{
  main {{ padding: 24px 16px 40px; }}
  .samples .row {{ grid-template-columns: 1fr; }}
  .samples .row:first-child {{ display: none; }}
}}
@media print {{ .completion, .prompt pre {{ max-height: none; }} }}
"""
