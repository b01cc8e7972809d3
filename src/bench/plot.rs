//! The curves of a measurement over the number of clients, as one SVG file: tokens a second, and
//! the median and 99th percentile of the time to the first token and between tokens.

use crate::Result;
use cresset_node::NodeError;
use plotters::chart::{ChartBuilder, SeriesLabelPosition};
use plotters::coord::Shift;
use plotters::prelude::{
    BLACK, Circle, Color, DrawingArea, IntoDrawingArea, IntoLogRange, LineSeries, RGBColor,
    SVGBackend, WHITE,
};
use serde_json::Value;
use std::error::Error;
use std::path::Path;

type Plotted = Result<(), Box<dyn Error>>;

const SIZE: (u32, u32) = (1_200, 420);
const MEDIAN: RGBColor = RGBColor(21, 87, 176);
const RARE: RGBColor = RGBColor(168, 72, 13);

/// One chart: its title, and for each line its name, its colour and where its values stand.
type Curves = (&'static str, &'static [(&'static str, RGBColor, &'static str)]);

const CHARTS: [Curves; 3] = [
    ("tokens a second", &[("all clients", MEDIAN, "/output_tokens_per_second")]),
    (
        "first token, ms",
        &[
            ("median", MEDIAN, "/time_to_first_token_ms/p50"),
            ("99th percentile", RARE, "/time_to_first_token_ms/p99"),
        ],
    ),
    (
        "between tokens, ms",
        &[
            ("median", MEDIAN, "/inter_token_ms/p50"),
            ("99th percentile", RARE, "/inter_token_ms/p99"),
        ],
    ),
];

/// Draws the levels of a `bench` document.
pub fn write(file: &Path, document: &Value) -> Result {
    let levels = document["levels"].as_array().map_or(&[][..], Vec::as_slice);
    let drawn = (|| {
        let area = SVGBackend::new(file, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        for (chart, part) in CHARTS.iter().zip(area.split_evenly((1, CHARTS.len()))) {
            draw(&part, chart, levels)?;
        }
        area.present()?;
        Plotted::Ok(())
    })();
    drawn.map_err(|error| NodeError::new(format!("{}: {error}", file.display())))
}

fn draw(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    (title, lines): &Curves,
    levels: &[Value],
) -> Plotted {
    let points = |path: &str| -> Vec<(f64, f64)> {
        let point =
            |level: &Value| Some((level["concurrency"].as_f64()?, level.pointer(path)?.as_f64()?));
        levels.iter().filter_map(point).collect()
    };
    let all: Vec<(f64, f64)> = lines.iter().flat_map(|(.., path)| points(path)).collect();
    let most = all.iter().map(|(clients, _)| *clients).fold(2.0, f64::max);
    let top = all.iter().map(|(_, value)| *value).fold(0.0, f64::max).max(1.0) * 1.1;
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d((1.0..most).log_scale(), 0.0..top)?;
    chart
        .configure_mesh()
        .x_desc("clients")
        .x_label_formatter(&|clients| format!("{clients:.0}"))
        .y_label_formatter(&|value| format!("{value:.0}"))
        .light_line_style(WHITE)
        .draw()?;
    for (name, colour, path) in *lines {
        let points = points(path);
        chart
            .draw_series(LineSeries::new(points.iter().copied(), colour.stroke_width(2)))?
            .label(*name)
            .legend(|(x, y)| Circle::new((x + 8, y), 4, colour.filled()));
        chart.draw_series(points.iter().map(|at| Circle::new(*at, 3, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .border_style(BLACK)
        .background_style(WHITE)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_level_is_a_point_of_each_line() {
        let level = |clients: u32| {
            let times = json!({ "p50": clients, "p99": 2 * clients });
            json!({ "concurrency": clients, "output_tokens_per_second": 10 * clients,
                    "time_to_first_token_ms": times, "inter_token_ms": times })
        };
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("b.svg");
        write(&file, &json!({ "levels": [level(1), level(8), level(64)] })).unwrap();
        let svg = std::fs::read_to_string(&file).unwrap();
        // Three points and one mark in the legend for each of five lines.
        assert_eq!(svg.matches("<circle").count(), 5 * 4, "{svg}");
        for text in ["tokens a second", "first token, ms", "99th percentile", "clients"] {
            assert!(svg.contains(text), "{text}");
        }
        write(&file, &json!({ "levels": [] })).unwrap();
        assert!(write(folder.path(), &json!({})).is_err(), "a folder is no file");
    }
}
