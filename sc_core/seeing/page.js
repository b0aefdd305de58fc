(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const names = ["c1", "c2", "c3", "c4", "c5", "c6", "c7", "muted"];

  const resolved = (value, colours) => {
    if (typeof value === "string") return colours[value] ?? value;
    if (Array.isArray(value)) {
      return typeof value[0] === "object" ? value.map((each) => resolved(each, colours)) : value;
    }
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.entries(value).map(([key, each]) => [key, resolved(each, colours)])
    );
  };

  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    const colours = Object.fromEntries(names.map((name) => [name, of(name)]));
    for (const [id, figure] of Object.entries(figures)) {
      const { data, layout } = resolved(figure, colours);
      const axis = {
        gridcolor: of("grid"), zerolinecolor: of("edge"), linecolor: of("edge"),
        automargin: true, tickfont: { size: 12 },
      };
      const titled = (given) => ({
        ...axis, ...given, title: { text: given.title, font: { size: 12 }, standoff: 8 },
      });
      Plotly.react(id, data, {
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, color: of("soft"), size: 12 },
        margin: { l: 52, r: 14, t: 22, b: 40 },
        legend: { orientation: "h", y: -0.2, x: 0, yanchor: "top" },
        hovermode: "x", hoverlabel: { namelength: -1 }, bargap: 0.25,
        ...layout, xaxis: titled(layout.xaxis), yaxis: { rangemode: "tozero", ...titled(layout.yaxis) },
      }, {
        responsive: true, displayModeBar: false,
      });
    }
    document.documentElement.dataset.drawn = Object.keys(figures).length;
  };

  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", draw);
  }
  draw();
})();
