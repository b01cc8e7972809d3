//! The report as one HTML page: no other file, no script. What decides stands first.

use super::{Report, escape, faults, figures};
use crate::record::{CheckResult, CheckState, Verdict};
use std::fmt::Write;

const STYLE: &str = include_str!("report.css");

pub fn html(report: &Report) -> String {
    let title = escape(&report.title);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style></head><body>\n"
    );
    out += &summary(report);
    out += &figures::curves(report.checks);
    out += "<h2>Checks</h2>\n<table class=\"checks\">\n";
    let head = COLUMNS.map(|column| format!("<th>{column}</th>")).concat();
    let _ = writeln!(out, "<tr>{head}</tr>");
    report.checks.iter().for_each(|check| out += &row(report, check));
    out += "</table>\n";
    out += &times(report.checks);
    out += &memory(&report.memory);
    out += "<h2>Evidence</h2>\n<table class=\"facts\">\n";
    for (label, value) in &report.facts {
        let _ = writeln!(out, "<tr><th>{label}</th><td>{}</td></tr>", escape(value));
    }
    out + "</table>\n</body></html>\n"
}

fn times(checks: &[CheckResult]) -> String {
    let row =
        |check: &CheckResult| (check.id.clone(), check.seconds, format!("{:.2} s", check.seconds));
    let rows: Vec<_> = checks.iter().map(row).collect();
    format!("<h2>Time of each check</h2>\n{}", figures::bars(&rows))
}

fn memory(parts: &[(String, u64)]) -> String {
    if parts.is_empty() {
        return String::new();
    }
    let row = |(name, bytes): &(String, u64)| {
        let bytes = *bytes as f64;
        (name.clone(), bytes, format!("{:.1} MiB", bytes / f64::from(1 << 20)))
    };
    let rows: Vec<_> = parts.iter().map(row).collect();
    format!("<h2>Memory</h2>\n{}", figures::bars(&rows))
}

/// Verdict, grade, counts and the first red check: all on the first screen.
fn summary(report: &Report) -> String {
    let mut out = format!(
        "<header class=\"{}\"><h1>{}</h1>\n<p class=\"verdict\">{}</p>\n",
        verdict_class(report.verdict),
        escape(&report.title),
        report.verdict.words()
    );
    if let Some(grade) = &report.grade {
        let _ = writeln!(out, "<p>Grade: <b>{}</b></p>", escape(grade));
    }
    let count = |state| report.checks.iter().filter(|check| check.state == state).count();
    let seconds: f64 = report.checks.iter().map(|check| check.seconds).sum();
    let _ = writeln!(
        out,
        "<p>{} passed, {} failed, {} not run, {} withheld, in {seconds:.0} s.</p>",
        count(CheckState::Passed),
        count(CheckState::Failed),
        count(CheckState::NotRun),
        count(CheckState::Withheld)
    );
    let red = report.checks.iter().find(|check| check.state == CheckState::Failed);
    out += &red.map(|red| first_failed(report, red)).unwrap_or_default();
    out + "</header>\n"
}

fn first_failed(report: &Report, check: &CheckResult) -> String {
    format!(
        "<p>First failed check: <b>{}</b>, which proves that {}.<br>Measured: {}<br>\
         Required: {}</p>\n<p><code>{}</code></p>\n",
        escape(&check.id),
        escape(&check.proves),
        escape(&check.value),
        escape(&check.gate),
        escape(&report.reproduce(check))
    )
}

const COLUMNS: [&str; 6] =
    ["Check", "Result", "Measured", "Required", "Proves, and must find", "Reproduce"];

/// The cells carry their column's name, which a narrow screen shows beside them.
fn row(report: &Report, check: &CheckResult) -> String {
    let found = faults::of(&check.id).iter().map(|fault| format!("<li>{}</li>", escape(fault)));
    let found: String = found.collect();
    let cells = [
        format!("{} {}", escape(&check.stage), escape(&check.id)),
        check.state.words().to_owned(),
        escape(&check.value),
        escape(&check.gate),
        format!("{}<ul>{found}</ul>", escape(&check.proves)),
        format!("<code>{}</code>", escape(&report.reproduce(check))),
    ];
    let named = COLUMNS.iter().zip(cells);
    let cells = named.map(|(column, cell)| format!("<td data-column=\"{column}\">{cell}</td>"));
    let cells = cells.collect::<Vec<_>>().concat();
    format!("<tr class=\"{}\">{cells}</tr>\n", state_class(check.state))
}

fn verdict_class(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Qualified => "passed",
        Verdict::Failed => "failed",
        Verdict::Inconclusive => "not_run",
    }
}

fn state_class(state: CheckState) -> &'static str {
    match state {
        CheckState::Passed => "passed",
        CheckState::Failed => "failed",
        CheckState::NotRun | CheckState::Withheld => "not_run",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::records;

    #[test]
    fn what_decides_stands_on_the_first_screen() {
        let mut record = records::of(Verdict::Qualified);
        record.verdict = Verdict::Failed;
        record.checks[4].state = CheckState::Failed;
        record.checks[4].value = "<b> & \"c\"".into();
        let page = html(&(&record).into());
        let (header, rest) = page.split_once("</header>").unwrap();
        let id = &record.checks[4].id;
        for part in ["NOT qualified", "1 failed", id, "&lt;b&gt; &amp; &quot;c&quot;"] {
            assert!(header.contains(part), "{part}: {header}");
        }
        let command = format!("cresset qualify fake --suite quick --only {id}");
        assert!(header.contains(&command) && rest.contains(&command));
        for check in &record.checks {
            assert!(rest.contains(&format!("--only {}<", check.id)), "{}", check.id);
        }
    }

    #[test]
    fn the_page_needs_nothing_else() {
        let page = html(&(&records::of(Verdict::Qualified)).into());
        for outside in ["http://", "https://", "src=", "<script", "@import", "url("] {
            assert!(!page.contains(outside), "{outside}");
        }
        assert!(page.contains("prefers-color-scheme:dark") && page.contains("max-width:40rem"));
    }
}
