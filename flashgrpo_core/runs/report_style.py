"""The look of `report.html`: one style sheet for light and dark, wide and narrow."""

STYLE = """
:root{color-scheme:light dark;
--page:#f5f5f3;--card:#fff;--ink:#1b1d22;--soft:#5d636e;--line:#e3e3df;--grid:#ececea;
--chip:#efefec;
--c1:#3563d9;--c2:#d9662b;--c3:#12886a;--c4:#9a48b8;--c5:#b08914;--c6:#5f6b7a;
--good:#0d7f57;--bad:#c0352b;--warn-bg:#fff6e0;--warn-line:#e8c566}
@media (prefers-color-scheme:dark){:root{
--page:#131519;--card:#1c1f25;--ink:#eceef2;--soft:#9aa2af;--line:#2e323a;--grid:#292d34;
--chip:#272b32;
--c1:#7ea4ff;--c2:#ff9a62;--c3:#48cfa6;--c4:#d28aee;--c5:#e6c04c;--c6:#94a0b0;
--good:#4fd6a0;--bad:#ff7d70;--warn-bg:#2c2616;--warn-line:#6f5a1d}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;
-webkit-font-smoothing:antialiased;font-variant-numeric:tabular-nums}
main{max-width:1160px;margin:0 auto;padding:36px 20px 60px}
header{display:flex;flex-wrap:wrap;gap:4px 14px;align-items:baseline;margin-bottom:18px}
h1{font-size:26px;line-height:1.2;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
header p{margin:0;color:var(--soft)}
h2{font-size:18px;margin:38px 0 12px;letter-spacing:-.005em}
h2+.lead{margin:-8px 0 14px;color:var(--soft);max-width:76ch}
.card{background:var(--card);border:1px solid var(--line);border-radius:14px;padding:18px 20px;
min-width:0}
.hero{display:grid;grid-template-columns:minmax(300px,5fr) 7fr;gap:0;padding:0;overflow:hidden}
.hero>div{padding:24px 26px}
.hero .big{font-size:58px;line-height:1.05;font-weight:650;letter-spacing:-.03em;margin:2px 0 6px}
.hero .what{font-size:16px;max-width:44ch;margin:0 0 6px}
.hero .fine{color:var(--soft);font-size:13.5px;margin:0;max-width:52ch}
.up{color:var(--good)}.down{color:var(--bad)}.flat{color:var(--soft)}
.facts{border-left:1px solid var(--line);display:grid;grid-template-columns:repeat(3,minmax(0,1fr));
gap:18px 16px;align-content:center}
.facts dt,.key{color:var(--soft);font-size:12.5px}
.facts dl{margin:0}.facts dd{margin:0;font-size:19px;font-weight:600;overflow-wrap:anywhere}
.facts dd.small{font-size:14px;font-weight:500}
.chip{display:inline-block;padding:1px 10px;border-radius:99px;background:var(--chip);
font-size:13px;font-weight:600}
.chip.finished{color:var(--good)}.chip.failed{color:var(--bad)}
.grid{fill:none;stroke:var(--grid)}
.pair{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
figure{margin:0}
figcaption{display:flex;flex-wrap:wrap;justify-content:space-between;gap:2px 16px;margin-bottom:6px}
figcaption b{font-weight:600}
figure>.say{margin:6px 0 0;color:var(--soft);font-size:13px}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;color:var(--soft)}
.sw{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:6px;
vertical-align:middle}
.sw.round{width:9px;height:9px;border-radius:9px}
.sw.dash{background:none!important;border-top:2px dashed var(--c6);height:0;border-radius:0}
.b1{background:var(--c1)}.b2{background:var(--c2)}.b3{background:var(--c3)}
.b4{background:var(--c4)}.b5{background:var(--c5)}.b6{background:var(--c6)}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--soft);font-size:12px}
svg .end{text-anchor:end}svg .mid{text-anchor:middle}svg .start{text-anchor:start}
.note{font-size:11.5px!important;paint-order:stroke;stroke:var(--card);stroke-width:4px;
stroke-linejoin:round}
.facts dl.long{grid-column:1/-1}
.line,.join,.thin,.dashed,.whisker{fill:none;stroke-linejoin:round;stroke-linecap:round}
.line{stroke-width:2.2}.join{stroke-width:1.6;opacity:.8}.thin{stroke-width:1.1;opacity:.5}
.dashed{stroke-width:1.6;stroke-dasharray:5 4}.whisker{stroke-width:1.8;opacity:.8}
.band{opacity:.15}.rule{stroke:var(--soft);stroke-dasharray:4 4;opacity:.8}
.mark{stroke:var(--soft);stroke-dasharray:2 3;opacity:.8}
.dot{stroke:var(--card);stroke-width:1.5}.hit{fill:transparent}.hit:hover{fill:var(--soft);
opacity:.55}
.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}.s4{stroke:var(--c4)}.s5{
stroke:var(--c5)}.s6{stroke:var(--c6)}
.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}.f4{fill:var(--c4)}.f5{fill:var(--c5)}.f6{
fill:var(--c6)}
.narrow{display:none}
.empty{color:var(--soft);margin:20px 0}
.share{display:flex;height:26px;border-radius:8px;overflow:hidden;gap:2px;margin:6px 0 12px}
.share i{display:block;min-width:2px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:right;padding:5px 8px;border-bottom:1px solid var(--line);font-weight:400;
vertical-align:top}
thead th{color:var(--soft);font-size:12.5px;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
tbody tr:last-child>*{border-bottom:0}
.plain th,.plain td{padding:4px 0}.plain td{padding-left:14px}
tr.total>*{font-weight:650}
.scroll{overflow-x:auto}
.warn{background:var(--warn-bg);border-color:var(--warn-line);margin-top:16px}
.warn ul{margin:0;padding-left:20px}.warn li{margin:4px 0;overflow-wrap:anywhere}.warn small{
color:var(--soft)}
.films{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:16px}
.film{padding:12px}
.film .two{display:grid;grid-template-columns:1fr 1fr;gap:8px}
.film video{display:block;width:100%;border-radius:8px;background:#000;aspect-ratio:var(--ratio,
auto)}
.film .lost{display:grid;place-items:center;min-height:120px;border-radius:8px;
background:var(--chip);color:var(--soft);font-size:13px;padding:8px;text-align:center}
.film .cap{display:flex;justify-content:space-between;gap:8px;font-size:12.5px;color:var(--soft);
margin-top:5px}
.film .cap b{color:var(--ink);font-weight:600}
.film p{margin:9px 2px 2px;font-size:14px;overflow-wrap:anywhere}
.settings{columns:2;column-gap:16px}
.settings .card{break-inside:avoid;margin-bottom:16px}
.settings h3{margin:0 0 4px;font-size:14px}
.settings td{overflow-wrap:anywhere;text-align:right;max-width:0;width:58%}
.settings th{color:var(--soft);text-align:left}
.settings .set td{font-weight:650}.settings .set th{color:var(--ink)}
footer{margin-top:40px;color:var(--soft);font-size:13px}
@media (max-width:860px){.hero{grid-template-columns:1fr}.facts{border-left:0;
border-top:1px solid var(--line)}
.pair{grid-template-columns:1fr}.settings{columns:1}}
@media (max-width:640px){main{padding:22px 12px 40px}.wide{display:none}.narrow{display:block}
.hero>div{padding:18px}.hero .big{font-size:46px}.facts{grid-template-columns:1fr 1fr}
.card:not(.hero){padding:14px}h1{font-size:22px}svg text{font-size:14.5px}.note{font-size:13.5px!important}}
@media print{body{background:#fff}.card{break-inside:avoid}}
"""
