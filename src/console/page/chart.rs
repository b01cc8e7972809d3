//! Curves as SVG, drawn without colours or styles of their own: the page's style sheet has those,
//! for light and dark.

use maud::{Markup, PreEscaped, html};
use plotters::chart::ChartBuilder;
use plotters::prelude::{BLACK, Color, IntoDrawingArea, LineSeries, RGBColor, SVGBackend, WHITE};
use std::error::Error;

const SIZE: (u32, u32) = (480, 180);
/// What stands for the colour of each line until it is replaced by a class.
const LINES: [RGBColor; 2] = [RGBColor(1, 2, 3), RGBColor(4, 5, 6)];

/// A line of a chart: its name and its points, the first coordinate in minutes before now.
pub(super) struct Line {
    pub name: &'static str,
    pub points: Vec<(f64, f64)>,
}

/// At most two lines over the last ten minutes, and their latest values for those who do not see
/// them.
pub(super) fn lines(title: &str, unit: &str, lines: &[Line]) -> Markup {
    let latest = |line: &Line| line.points.last().map_or(0.0, |(_, value)| *value);
    let told = lines.iter().map(|line| format!("{} {}", line.name, number(latest(line))));
    let told = told.collect::<Vec<_>>().join(", ");
    html! {
        figure {
            figcaption {
                strong { (title) }
                @for (index, line) in lines.iter().enumerate() {
                    @let value = number(latest(line));
                    " " span class={ "key line-" (index) } { (line.name) " " (value) }
                }
                " " (unit)
            }
            @match drawn(lines) {
                Ok(svg) => div role="img" aria-label={ (title) ": " (told) " " (unit) } {
                    (PreEscaped(svg))
                },
                Err(error) => p { "The chart could not be drawn: " (error) },
            }
        }
    }
}

fn drawn(lines: &[Line]) -> Result<String, Box<dyn Error>> {
    let values = lines.iter().flat_map(|line| &line.points).map(|(_, value)| *value);
    let top = values.fold(0.0, f64::max) * 1.1;
    let top = if top > 0.0 { top } else { 1.0 };
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        let mut chart = ChartBuilder::on(&area)
            .margin(8)
            .x_label_area_size(22)
            .y_label_area_size(52)
            .build_cartesian_2d(-10.0..0.0, 0.0..top)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(WHITE)
            .bold_line_style(BLACK.mix(0.15))
            .label_style(("sans-serif", 15))
            .x_labels(6)
            .y_labels(4)
            .x_label_formatter(&|minutes: &f64| match minutes {
                now if now.abs() < 0.01 => "now".to_owned(),
                minutes => format!("{minutes:.0} min"),
            })
            .y_label_formatter(&|value: &f64| number(*value))
            .draw()?;
        for (line, colour) in lines.iter().zip(LINES) {
            chart.draw_series(LineSeries::new(
                line.points.iter().copied(),
                colour.stroke_width(2),
            ))?;
        }
        area.present()?;
    }
    Ok(uncoloured(&svg))
}

/// Colours that the library wrote, as classes of the page's style sheet.
fn uncoloured(svg: &str) -> String {
    svg.replace("stroke=\"#010203\"", "class=\"line-0\"")
        .replace("stroke=\"#040506\"", "class=\"line-1\"")
        .replace("stroke=\"#000000\"", "class=\"axis\"")
        .replace("fill=\"#000000\"", "class=\"label\"")
        .replace("stroke=\"#FFFFFF\"", "class=\"none\"")
        .replace("<svg width=\"480\" height=\"180\"", "<svg aria-hidden=\"true\"")
}

/// Three digits, without more after the point than they need.
pub(super) fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        small if small < 1.0 => {
            format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').to_owned()
        }
        middle if middle < 100.0 => {
            format!("{value:.1}").trim_end_matches('0').trim_end_matches('.').to_owned()
        }
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_leaves_colours_to_the_style_sheet() {
        let line = |name, top| Line { name, points: vec![(-9.0, 1.0), (0.0, top)] };
        let svg = lines("Tokens", "a second", &[line("a", 120.0), line("b", 3.0)]).into_string();
        for class in ["class=\"line-0\"", "class=\"line-1\"", "class=\"axis\"", "class=\"label\""] {
            assert!(svg.contains(class), "{class}: {svg}");
        }
        assert!(!svg.contains('#') && !svg.contains("style="), "{svg}");
        assert!(svg.contains("aria-label=\"Tokens: a 120, b 3 a second\""), "{svg}");
        assert!(lines("None", "", &[]).into_string().contains("<svg"));
    }

    #[test]
    fn numbers() {
        let shown = [0.0, 0.05, 0.5, 1.0, 12.34, 99.96, 1234.5].map(number);
        assert_eq!(shown, ["0", "0.05", "0.5", "1", "12.3", "100", "1234"]);
    }
}
