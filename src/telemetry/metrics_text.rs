//! The two text forms in which metrics are read: OpenMetrics, and the older one of Prometheus. They
//! differ in how counters and infos are named in the lines about them, and in the end of the text.

use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderName};
use std::fmt::Write;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TextForm {
    Prometheus,
    OpenMetrics,
}

/// The answer to a scrape with these headers. `open_metrics` are the metrics in OpenMetrics' form.
pub fn metrics_text(
    headers: &HeaderMap,
    open_metrics: String,
) -> ([(HeaderName, &'static str); 1], String) {
    let (media_type, text) = match TextForm::asked(headers) {
        TextForm::OpenMetrics => {
            ("application/openmetrics-text; version=1.0.0; charset=utf-8", open_metrics)
        }
        TextForm::Prometheus => ("text/plain; version=0.0.4; charset=utf-8", older(&open_metrics)),
    };
    ([(CONTENT_TYPE, media_type)], text)
}

impl TextForm {
    /// OpenMetrics is for clients that name it and like the older form no better. The older form is
    /// for all others, those that accept neither included: every program that reads metrics knows
    /// it.
    fn asked(headers: &HeaderMap) -> Self {
        let values = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let text = values.collect::<Vec<_>>().join(",").to_ascii_lowercase();
        let ranges: Vec<MediaRange> = text.split(',').map(MediaRange::read).collect();
        let quality = |name: &str, version: &str| {
            let named = ranges.iter().filter(|range| range.name == name);
            let named = named.filter(|range| range.version.is_none_or(|own| own == version));
            named.map(|range| range.quality).reduce(f32::max)
        };
        let older = quality("text/plain", "0.0.4")
            .or_else(|| quality("text/*", ""))
            .or_else(|| quality("*/*", ""));
        match quality("application/openmetrics-text", "1.0.0") {
            Some(open) if open > 0.0 && open >= older.unwrap_or(0.0) => Self::OpenMetrics,
            _ => Self::Prometheus,
        }
    }
}

/// One part of an `Accept` header. An unreadable quality counts as absent.
struct MediaRange<'a> {
    name: &'a str,
    version: Option<&'a str>,
    quality: f32,
}

impl<'a> MediaRange<'a> {
    fn read(text: &'a str) -> Self {
        let mut parts = text.split(';').map(str::trim);
        let mut range = Self { name: parts.next().unwrap_or(""), version: None, quality: 1.0 };
        for (name, value) in parts.filter_map(|parameter| parameter.split_once('=')) {
            match name.trim_end() {
                "version" => range.version = Some(value.trim_matches([' ', '"'])),
                "q" => range.quality = value.trim_start().parse().unwrap_or(0.0),
                _ => {}
            }
        }
        range
    }
}

/// OpenMetrics in Prometheus' older form, where the lines about a counter or an info have the names
/// of their samples.
fn older(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len() + open_metrics.len() / 16);
    let mut help = "";
    for line in open_metrics.lines() {
        let Some(about) = line.strip_prefix("# ") else {
            text.push_str(line);
            text.push('\n');
            continue;
        };
        let mut words = about.splitn(3, ' ');
        match [words.next(), words.next(), words.next()] {
            [Some("HELP"), _, Some(told)] => help = told,
            [Some("TYPE"), Some(name), Some(kind)] => {
                let (ending, kind) = match kind {
                    "counter" => ("_total", "counter"),
                    "info" => ("_info", "gauge"),
                    kind => ("", kind),
                };
                let _ =
                    write!(text, "# HELP {name}{ending} {help}\n# TYPE {name}{ending} {kind}\n");
            }
            // The end of the text.
            _ => {}
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Metrics;
    use hyper::header::HeaderValue;

    #[test]
    fn the_form_that_a_client_likes_best() {
        let check = |accept: &str, expect: TextForm| {
            let value = (ACCEPT, HeaderValue::from_str(accept).unwrap());
            assert_eq!(TextForm::asked(&HeaderMap::from_iter([value])), expect, "{accept}");
        };
        // Prometheus 2.5, 2.42 and 3.
        check(
            "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            TextForm::Prometheus,
        );
        check(
            "application/openmetrics-text;version=1.0.0,\
             application/openmetrics-text;version=0.0.1;q=0.75,\
             text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            TextForm::OpenMetrics,
        );
        check(
            "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;q=0.6,\
             application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
             text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
            TextForm::OpenMetrics,
        );
        check("", TextForm::Prometheus);
        check("*/*", TextForm::Prometheus);
        check("text/html, application/xhtml+xml, */*;q=0.8", TextForm::Prometheus);
        check("application/json", TextForm::Prometheus);
        check("Application/OpenMetrics-Text; Version=\"1.0.0\"; Q=0.3", TextForm::OpenMetrics);
        check("application/openmetrics-text;q=0.3, text/plain;q=0.4", TextForm::Prometheus);
        check("application/openmetrics-text;q=0.3, */*", TextForm::Prometheus);
        check("application/openmetrics-text;q=0, text/plain;q=0", TextForm::Prometheus);
        check("application/openmetrics-text;q=high", TextForm::Prometheus);
        assert_eq!(TextForm::asked(&HeaderMap::new()), TextForm::Prometheus);
    }

    #[test]
    fn both_forms_tell_the_same_samples() {
        let metrics = Metrics::default();
        metrics.http_response(200, "ok");
        metrics.of_model("a # b").tokens(5, 2, 3);
        let open = metrics.text();
        let older = older(&open);
        let samples = |text: &str| -> Vec<String> {
            text.lines().filter(|line| !line.starts_with('#')).map(str::to_owned).collect()
        };
        assert_eq!(samples(&older), samples(&open));
        assert!(open.ends_with("# EOF\n") && !older.contains("# EOF"));
        for (form, line) in [
            (&open, "# TYPE cresset_http_responses counter"),
            (&older, "# TYPE cresset_http_responses_total counter"),
            (&older, "# HELP cresset_http_responses_total HTTP responses by status and code."),
            (&open, "# TYPE cresset_build info"),
            (&older, "# TYPE cresset_build_info gauge"),
            (&older, "# TYPE cresset_ready gauge"),
            (&older, "# TYPE cresset_request_prompt_tokens histogram"),
        ] {
            assert!(form.lines().any(|told| told == line), "{line} is not in\n{form}");
        }
        let about = |text: &str| text.lines().filter(|line| line.starts_with("# HELP")).count();
        assert_eq!(about(&older), about(&open));
    }
}
