//! Names, labels, notes and references, which are kept and shown to people later on.

use super::command::AdminCommand;
use super::error::AdminError;
use cresset_base::is_unseen;

/// Refuses texts with characters that are not seen and change how others are shown. Commands that
/// only find what has such a name already are let through.
pub(super) fn check(command: &AdminCommand) -> Result<(), AdminError> {
    use AdminCommand as C;
    let (kind, text, other) = match command {
        C::AccountCreate { name, reference, .. } => ("name", Some(name), reference.as_ref()),
        C::AccountChange { name, note, .. } => ("name", name.as_ref(), note.as_ref()),
        C::KeyCreate { label, .. } => ("label", label.as_ref(), None),
        C::ApplicationCreate { name, .. } | C::OperatorTokenCreate { name, .. } => {
            ("name", Some(name), None)
        }
        C::CreditGrant { reference, .. } | C::CreditDebit { reference, .. } => {
            ("reference", Some(reference), None)
        }
        _ => return Ok(()),
    };
    let other_kind = if matches!(command, C::AccountChange { .. }) { "note" } else { "reference" };
    let texts = [(kind, text), (other_kind, other)];
    let unseen = texts.into_iter().find_map(|(kind, text)| Some((kind, text?.find(is_unseen)?)));
    let Some((kind, at)) = unseen else { return Ok(()) };
    Err(AdminError::Invalid(format!(
        "the {kind} has a line break, a control character or a mark of direction after its first \
         {at} bytes: leave it out"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_base::AccountId;
    use cresset_ledger::Bucket;
    use std::collections::BTreeSet;

    #[test]
    fn what_is_shown_later_has_no_unseen_characters() {
        let account = AccountId::generate();
        let commands = |text: &str| {
            let text = || text.to_owned();
            let (bucket, units) = (Bucket::Trial, 1);
            let change = |name, note| AdminCommand::AccountChange {
                id: account,
                name,
                plan: None,
                note,
                stores_answers: None,
            };
            let create = |name, reference| AdminCommand::AccountCreate {
                name,
                plan: None,
                trial: 0,
                premium: 0,
                reference,
            };
            [
                ("name", create(text(), None)),
                ("reference", create("plain".into(), Some(text()))),
                ("name", change(Some(text()), None)),
                ("note", change(None, Some(text()))),
                (
                    "label",
                    AdminCommand::KeyCreate { account, label: Some(text()), expires_at: None },
                ),
                ("name", AdminCommand::ApplicationCreate { account, name: text() }),
                (
                    "reference",
                    AdminCommand::CreditGrant { account, bucket, units, reference: text() },
                ),
                (
                    "reference",
                    AdminCommand::CreditDebit { account, bucket, units, reference: text() },
                ),
                (
                    "name",
                    AdminCommand::OperatorTokenCreate {
                        name: text(),
                        roles: BTreeSet::new(),
                        expires_at: None,
                    },
                ),
            ]
        };
        for wrong in ["a\u{202e}b", "a\u{2067}", "a\u{200f}", "a\u{61c}", "a\nb", "a\u{1b}[31m"] {
            for (kind, command) in commands(wrong) {
                let why = check(&command).unwrap_err().to_string();
                assert!(
                    why.contains(&format!("the {kind} has")) && why.contains("first 1 "),
                    "{why}"
                );
            }
        }
        for right in ["Zoë & Co.", "שלום", "عميل"] {
            assert!(commands(right).iter().all(|(_, command)| check(command).is_ok()), "{right}");
        }
        let find = AdminCommand::AccountFind { name: "a\u{202e}".into() };
        assert_eq!(check(&find), Ok(()));
    }
}
