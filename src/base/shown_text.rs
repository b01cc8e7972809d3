//! Names and other texts that people wrote, as they may be shown to others.

use std::borrow::Cow;
use std::fmt::Write;

/// Whether a character only turns the direction of the text around it.
pub fn is_direction_mark(character: char) -> bool {
    matches!(
        character,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    )
}

/// Whether a character is not seen itself and changes how what is around it is shown: control
/// characters, marks of direction, and separators of lines and paragraphs.
pub fn is_unseen(character: char) -> bool {
    character.is_control()
        || is_direction_mark(character)
        || matches!(character, '\u{2028}' | '\u{2029}')
}

/// The text with its characters that `escapes` as JSON escapes them: `\u202e`.
pub fn escaped(text: &str, escapes: fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(escapes) {
        return text.into();
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        if escapes(character) {
            let mut units = [0; 2];
            for unit in character.encode_utf16(&mut units) {
                let _ = write!(shown, "\\u{unit:04x}");
            }
        } else {
            shown.push(character);
        }
    }
    shown.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_seen_is_shown_escaped() {
        for (text, expect) in [
            ("Zoë & Co.", "Zoë & Co."),
            ("שלום", "שלום"),
            ("👩\u{200d}🔬", "👩\u{200d}🔬"),
            ("a\u{202e}gpj.exe", r"a\u202egpj.exe"),
            ("\u{61c}\u{200e}\u{200f}", r"\u061c\u200e\u200f"),
            ("\u{202a}\u{202d}\u{2066}\u{2069}", r"\u202a\u202d\u2066\u2069"),
            ("two\nlines\u{1b}[31m\u{7f}\u{9b}", r"two\u000alines\u001b[31m\u007f\u009b"),
            ("\u{2028}\u{2029}", r"\u2028\u2029"),
        ] {
            assert_eq!(escaped(text, is_unseen), expect);
        }
        assert_eq!(escaped("a\n\u{202e}", is_direction_mark), "a\n\\u202e");
    }
}
