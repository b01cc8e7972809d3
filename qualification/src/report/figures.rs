//! Drawings for the report, as SVG within the page: curves, and bars of time and of memory.

use super::escape;
use crate::record::{CheckResult, Series};
use std::fmt::Write;

/// Size of a curve's drawing and of the margins for its labels, in units of the drawing.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 40.0;
/// Points that a curve is drawn with at most; of those that share a place, the highest.
const MOST_POINTS: usize = 320;

/// Every curve behind the checks' values, each with its check's name.
pub(super) fn curves(checks: &[CheckResult]) -> String {
    let drawn = checks.iter().flat_map(|check| check.series.iter().map(move |one| (check, one)));
    drawn.filter_map(|(check, one)| Some(figure(&check.id, one, &curve(one)?))).collect()
}

fn figure(check: &str, series: &Series, drawing: &str) -> String {
    let (check, name) = (escape(check), escape(&series.name));
    format!("<figure>{drawing}<figcaption>{check}: {name}</figcaption></figure>\n")
}

/// `None` without two finite points to draw a line between.
fn curve(series: &Series) -> Option<String> {
    let finite = |(x, y): &&(f64, f64)| x.is_finite() && y.is_finite();
    let finite: Vec<(f64, f64)> = series.points.iter().filter(finite).copied().collect();
    let points = thinned(&finite);
    let [(left, right), (low, high)] = [range(points.iter().map(|p| p.0))?, {
        let (low, high) = range(points.iter().map(|p| p.1))?;
        (low.min(0.0), high.max(0.0))
    }];
    let along =
        |value: f64, from: f64, to: f64| (value - from) / (to - from).max(f64::MIN_POSITIVE);
    let x = |value: f64| LEFT + along(value, left, right) * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - along(value, low, high) * (HEIGHT - TOP - BOTTOM);
    let line: String =
        points.iter().fold(String::new(), |line, p| format!("{line}{:.1},{:.1} ", x(p.0), y(p.1)));
    let (bottom, edge) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
    let mut out = format!(
        "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{}\">\
         <path class=\"axis\" d=\"M{LEFT} {TOP}V{bottom}H{edge}\"/>\
         <polyline class=\"line\" points=\"{}\"/>",
        escape(&series.name),
        line.trim_end()
    );
    let [horizontal, vertical] = &series.axes;
    let label = |out: &mut String, x: f64, y: f64, anchor: &str, text: &str| {
        let text = escape(text);
        let _ = write!(out, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{text}</text>");
    };
    label(&mut out, LEFT - 6.0, y(high) + 4.0, "end", &number(high));
    label(&mut out, LEFT - 6.0, y(low), "end", &number(low));
    label(&mut out, LEFT, HEIGHT - 22.0, "start", &number(left));
    label(&mut out, edge, HEIGHT - 22.0, "end", &number(right));
    label(&mut out, LEFT, HEIGHT - 4.0, "start", &format!("{vertical} by {horizontal}"));
    Some(out + "</svg>")
}

fn range(values: impl Iterator<Item = f64> + Clone) -> Option<(f64, f64)> {
    let least = values.clone().reduce(f64::min)?;
    let most = values.reduce(f64::max)?;
    Some((least, most))
}

/// At most `MOST_POINTS`; peaks stay.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let share = points.len().div_ceil(MOST_POINTS).max(1);
    let highest = |part: &[(f64, f64)]| part.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1));
    points.chunks(share).filter_map(highest).collect()
}

/// Three significant digits.
fn number(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    if !(1e-3..1e6).contains(&value.abs()) {
        return format!("{value:.2e}");
    }
    let decimals = (2 - value.abs().log10().floor() as i32).max(0) as usize;
    format!("{value:.decimals$}")
}

/// One bar a row: label, size, and the size in words.
pub(super) fn bars(rows: &[(String, f64, String)]) -> String {
    let most = rows.iter().map(|row| row.1).fold(0.0, f64::max);
    let row = |(label, value, words): &(String, f64, String)| {
        let share = if most > 0.0 { value / most * 100.0 } else { 0.0 };
        format!(
            "<div class=\"bar\"><span>{}</span><svg viewBox=\"0 0 100 8\" \
             preserveAspectRatio=\"none\" aria-hidden=\"true\"><rect width=\"{share:.1}\" \
             height=\"8\"/></svg><span>{}</span></div>\n",
            escape(label),
            escape(words)
        )
    };
    rows.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(points: Vec<(f64, f64)>) -> Series {
        Series { name: "KL".into(), axes: ["position, tokens".into(), "KL, nat".into()], points }
    }

    #[test]
    fn a_curve_stays_within_its_drawing_and_keeps_its_peaks() {
        let mut points: Vec<(f64, f64)> = (0..5_000).map(|x| (f64::from(x), 0.1)).collect();
        points[3_333].1 = 9.0;
        let drawn = curve(&series(points)).unwrap();
        let line = drawn.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
        let places: Vec<(f64, f64)> = line
            .split(' ')
            .map(|place| place.split_once(',').unwrap())
            .map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()))
            .collect();
        assert!(places.len() <= MOST_POINTS);
        assert!(places.iter().all(|(x, y)| (LEFT..=WIDTH).contains(x) && *y <= HEIGHT - BOTTOM));
        assert!(places.iter().any(|(_, y)| *y == TOP), "the peak is at the top");
    }

    #[test]
    fn what_cannot_be_drawn_is_left_out() {
        assert_eq!(curve(&series(Vec::new())), None);
        assert_eq!(curve(&series(vec![(1.0, f64::NAN)])), None);
        assert!(curve(&series(vec![(1.0, 1.0)])).is_some_and(|drawn| !drawn.contains("NaN")));
    }

    #[test]
    fn numbers_have_three_digits() {
        let check = |value: f64, expect: &str| assert_eq!(number(value), expect);
        check(0.0, "0");
        check(0.012_34, "0.0123");
        check(123.4, "123");
        check(1_234.0, "1234");
        check(0.000_012, "1.20e-5");
    }
}
