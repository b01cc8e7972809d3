//! The formats of texts that answers are kept to. All others only describe.

/// Formats that the library keeps to as they are.
const OF_THE_LIBRARY: [&str; 7] = ["date", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

const TIME: &str = r"([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\.[0-9]{1,9})?([zZ]|[+-]([01][0-9]|2[0-3]):[0-5][0-9])";
const DATE: &str = r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-9]))";
const BYTE: &str = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
const IPV6: &str = r"([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,6}:[0-9a-fA-F]{1,4}|([0-9a-fA-F]{1,4}:){1,7}:|::([0-9a-fA-F]{1,4}:){0,5}[0-9a-fA-F]{1,4}|::";
const BASE64: &str = r"([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?";
const EMAIL: &str = r"([a-zA-Z0-9_'+-]+\.)*[a-zA-Z0-9_'+-]*[a-zA-Z0-9_+-]@([a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?\.)+[a-zA-Z]{2,63}";

/// Zod's expression for addresses. What its two assertions forbid, `EMAIL` cannot write either.
const ZOD_EMAIL: &str = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$";

/// Whether answers are kept to this format.
pub(super) fn is_kept(format: &str) -> bool {
    OF_THE_LIBRARY.contains(&format) || expression(format).is_some()
}

/// The expression of a format that is bounded tighter than the library does it, or that the library
/// does not know.
pub(super) fn expression(format: &str) -> Option<String> {
    let body = match format {
        "time" => TIME.to_owned(),
        "date-time" => format!("{DATE}[tT]{TIME}"),
        "duration" => duration(),
        "byte" | "base64" => BASE64.to_owned(),
        "ipvanyaddress" => format!(r"({BYTE}\.){{3}}{BYTE}|{IPV6}"),
        _ => return None,
    };
    Some(format!("^({body})$"))
}

fn duration() -> String {
    let [year, month, day, hour, minute, week] =
        ['Y', 'M', 'D', 'H', 'M', 'W'].map(|unit| format!("[0-9]{{1,9}}{unit}"));
    let second = r"[0-9]{1,9}(\.[0-9]{1,9})?S";
    let date = format!("({year}({month}({day})?)?|{month}({day})?|{day})");
    let time = format!("T({hour}({minute}({second})?)?|{minute}({second})?|{second})");
    format!("P({date}({time})?|{time}|{week})")
}

/// The expression that stands for one with assertions, which no automaton has.
pub(super) fn without_assertions(pattern: &str) -> Option<String> {
    (pattern == ZOD_EMAIL).then(|| format!("^({EMAIL})$"))
}
