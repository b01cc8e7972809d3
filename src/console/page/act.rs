//! What a form asks to do, as a command.

use super::Visitor;
use super::layout::{credits, microcredits, text};
use crate::Console;
use axum::Form;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect, Response};
use cresset_base::{UnixMillis, is_unseen};
use cresset_commands::{AdminCommand, ModelJob, Notice, Role};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Milliseconds for which a key that was replaced on the page still works: a day.
const GRACE_MS: u64 = 86_400_000;
/// Characters of a name, label or reference at most.
const MAX_TEXT: usize = 128;

/// What a form sent, by the names of its fields.
struct Fields(BTreeMap<String, String>);

pub(super) async fn submit(
    State(live): State<Arc<Console>>,
    visitor: Visitor,
    Form(fields): Form<BTreeMap<String, String>>,
) -> Response {
    let fields = Fields(fields);
    if !visitor.session.wrote(fields.get("form")) {
        let text = "this form is of another session: load the page again";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    let now = live.node.clock.now();
    let done = match fields.command(now) {
        Ok(command) => visitor.ask(&live, command).await,
        Err(error) => Err(error),
    };
    let back = fields.back(done.as_ref().ok());
    let notice = match &done {
        Ok(answer) => fields.notice(answer),
        Err(error) => Notice { text: error.clone(), secret: None, is_error: true },
    };
    live.sessions.tell(&visitor.session.id, notice, now);
    Redirect::to(&back).into_response()
}

impl Fields {
    fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", |text| text.trim())
    }

    /// The field, unless it was left empty.
    fn given(&self, name: &str) -> Option<&str> {
        Some(self.get(name)).filter(|text| !text.is_empty())
    }

    /// The page to come back to, which is one of this site; a new account has one of its own.
    fn back(&self, answer: Option<&Value>) -> String {
        let created = answer.filter(|_| self.get("command") == "account_create");
        if let Some(id) = created.and_then(|answer| answer["id"].as_str()) {
            return format!("/accounts/{id}");
        }
        let back = self.get("back");
        if is_own(back) { back.to_owned() } else { "/".to_owned() }
    }

    fn notice(&self, answer: &Value) -> Notice {
        let secret = answer["secret"].as_str().map(str::to_owned);
        Notice { text: self.done(answer), secret, is_error: false }
    }

    /// A value in the form that it has in JSON.
    fn parsed<T: DeserializeOwned>(&self, name: &str) -> Result<T, String> {
        serde_json::from_value(self.get(name).into())
            .map_err(|_| format!("{name}: {:?} is not of the right form", self.get(name)))
    }

    /// Text that is shown to people later on.
    fn label(&self, name: &str) -> Result<Option<String>, String> {
        let Some(text) = self.given(name) else { return Ok(None) };
        if text.chars().count() > MAX_TEXT || text.contains(is_unseen) {
            return Err(format!(
                "{name}: at most {MAX_TEXT} characters, and no line breaks or marks of direction"
            ));
        }
        Ok(Some(text.to_owned()))
    }

    fn needed(&self, name: &str) -> Result<String, String> {
        self.label(name)?.ok_or_else(|| format!("{name} is missing"))
    }

    fn amount(&self, name: &str) -> Result<u64, String> {
        self.given(name).map_or(Ok(0), microcredits)
    }

    /// Microcredits of a budget; `None` where it is to end.
    fn budget(&self) -> Result<Option<u64>, String> {
        self.given("units").map(microcredits).transpose()
    }

    fn percent(&self) -> Result<Option<u8>, String> {
        let wrong = |_| format!("{:?} is no percentage", self.get("percent"));
        self.given("percent").map(|text| text.parse().map_err(wrong)).transpose()
    }

    /// The end of the days that were given, from now.
    fn end(&self, now: UnixMillis) -> Result<Option<UnixMillis>, String> {
        let Some(days) = self.given("days") else { return Ok(None) };
        let wrong = || format!("{days:?} is no number of days");
        let days: u64 = days.parse().ok().filter(|days| *days > 0).ok_or_else(wrong)?;
        let length = days.checked_mul(86_400_000).ok_or_else(wrong)?;
        Ok(Some(UnixMillis(now.0.checked_add(length).ok_or_else(wrong)?)))
    }

    fn command(&self, now: UnixMillis) -> Result<AdminCommand, String> {
        use AdminCommand as C;
        Ok(match self.get("command") {
            "account_create" => C::AccountCreate {
                name: self.needed("name")?,
                plan: self.label("plan")?,
                trial: self.amount("trial")?,
                premium: self.amount("premium")?,
                reference: self.label("reference")?,
            },
            "account_change" => C::AccountChange {
                id: self.parsed("id")?,
                name: self.label("name")?,
                plan: self.label("plan")?,
                note: self.0.get("note").map(|note| note.trim().to_owned()),
                stores_answers: self.given("answers").map(|word| word == "on"),
            },
            "account_budget" => C::AccountBudget {
                id: self.parsed("id")?,
                period: self.parsed("period")?,
                units: self.budget()?,
                alert_percent: self.percent()?,
            },
            "account_erase_answers" => C::AccountEraseAnswers {
                id: self.parsed("id")?,
                request: self.given("request").map(|_| self.parsed("request")).transpose()?,
            },
            "account_suspend" => C::AccountSuspend { id: self.parsed("id")? },
            "account_close" => C::AccountClose {
                id: self.parsed("id")?,
                keep_credits: self.given("keep").is_some(),
                erase_answers: self.given("erase").is_some(),
            },
            "account_resume" => C::AccountResume { id: self.parsed("id")? },
            _ => return self.account_command(now),
        })
    }

    /// Commands on an account's keys and balances, or else those on models.
    fn account_command(&self, now: UnixMillis) -> Result<AdminCommand, String> {
        use AdminCommand as C;
        Ok(match self.get("command") {
            "key_create" => C::KeyCreate {
                account: self.parsed("account")?,
                label: self.label("label")?,
                expires_at: self.end(now)?,
            },
            "key_rotate" => C::KeyRotate {
                id: self.parsed("id")?,
                old_until: UnixMillis(now.0.saturating_add(GRACE_MS)),
                expires_at: None,
            },
            "key_revoke" => C::KeyRevoke { id: self.parsed("id")? },
            "key_budget" => C::KeyBudget {
                id: self.parsed("id")?,
                period: self.parsed("period")?,
                units: self.budget()?,
                alert_percent: self.percent()?,
            },
            "credit_grant" => C::CreditGrant {
                account: self.parsed("account")?,
                bucket: self.parsed("bucket")?,
                units: self.amount("units")?,
                reference: self.needed("reference")?,
            },
            "credit_debit" => C::CreditDebit {
                account: self.parsed("account")?,
                bucket: self.parsed("bucket")?,
                units: self.amount("units")?,
                reference: self.needed("reference")?,
            },
            _ => return self.model_command(),
        })
    }

    fn model_command(&self) -> Result<AdminCommand, String> {
        use AdminCommand as C;
        let release = || self.needed("release");
        let job = match self.get("command") {
            "model_load" => return Ok(C::ModelLoad { name: release()? }),
            "model_unload" => return Ok(C::ModelUnload { name: release()? }),
            "model_price" => {
                let price = |name| self.given(name).map(microcredits).transpose();
                let [input, cached_input, output] =
                    [price("input")?, price("cached_input")?, price("output")?];
                return Ok(C::ModelPrice { name: release()?, input, cached_input, output });
            }
            "job_stop" => {
                let number = self.get("number").parse().map_err(|_| "number is missing")?;
                return Ok(C::ModelJobStop { number });
            }
            "model_pull" => ModelJob::Pull { release: release()? },
            "model_add" => {
                let path = self.given("path").ok_or("path is missing")?.into();
                ModelJob::Add { path, name: self.label("name")? }
            }
            "qualify_quick" => ModelJob::Qualify { release: release()?, full: false },
            "qualify_full" => ModelJob::Qualify { release: release()?, full: true },
            "model_accept" => {
                ModelJob::Accept { release: release()?, reason: self.needed("reason")? }
            }
            "model_remove" => ModelJob::Remove { release: release()? },
            unknown => return Err(format!("there is no command {unknown:?}")),
        };
        Ok(C::ModelJobStart { job })
    }

    /// What a person is told when the command was executed.
    fn done(&self, answer: &Value) -> String {
        let amount = credits(&answer["units"]);
        match self.get("command") {
            "credit_grant" | "credit_debit" if answer["repeated"] == true => {
                "This reference was used for the same amount before: nothing was changed.".into()
            }
            "credit_grant" => format!("{amount} credits were granted."),
            "credit_debit" => format!("{amount} credits were taken back."),
            "account_create" => format!("The account {} was created.", text(&answer["name"])),
            "account_change" => "The account was changed.".into(),
            "account_budget" | "key_budget" if self.given("units").is_none() => {
                "The budget is ended.".into()
            }
            "account_budget" | "key_budget" => "The budget counts from now on.".into(),
            "account_erase_answers" => {
                format!("{} answers were erased.", text(&answer["erased_answers"]))
            }
            "account_suspend" => "The account is suspended.".into(),
            "account_resume" => "The account is active again.".into(),
            "account_close" => "The account is closed.".into(),
            "model_price" => "These prices hold for requests from now on.".into(),
            "key_create" => "A key was made:".into(),
            "key_rotate" => {
                "A key was made in place of the other, which works for a day still:".into()
            }
            "key_revoke" => "The key is revoked.".into(),
            "model_load" => "The model is being loaded.".into(),
            "model_unload" => "The model is being unloaded.".into(),
            "job_stop" => "The job is being stopped.".into(),
            _ => format!("Job {} has begun.", text(&answer["number"])),
        }
    }
}

/// Whether the address is a path of this site to every browser: some leave out control characters,
/// and some take a backslash for a slash.
fn is_own(address: &str) -> bool {
    let mut bytes = address.bytes();
    bytes.next() == Some(b'/')
        && !address.starts_with("//")
        && bytes.all(|byte| byte.is_ascii_graphic() && byte != b'\\')
}

/// The role that a form's command needs.
pub(super) fn role(command: &str) -> Role {
    match command {
        "account_budget" | "account_close" | "credit_debit" | "credit_grant" | "key_budget"
        | "model_price" => Role::Money,
        _ => Role::Operate,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cresset_commands::Actor;
    use std::collections::BTreeSet;

    fn fields(pairs: &[(&str, &str)]) -> Fields {
        Fields(pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect())
    }

    #[test]
    fn forms_become_commands_or_say_what_is_wrong() {
        let account = "00000000-0000-4000-8000-000000000001";
        let grant = |units: &str, bucket: &str, reference: &str| {
            let fields = fields(&[
                ("command", "credit_grant"),
                ("account", account),
                ("bucket", bucket),
                ("units", units),
                ("reference", reference),
            ]);
            fields.command(UnixMillis(0))
        };
        let AdminCommand::CreditGrant { units, .. } = grant("0.5", "trial", "r").unwrap() else {
            panic!("it is another command")
        };
        assert_eq!(units, 500_000);
        for (units, bucket, reference, says) in [
            ("x", "trial", "r", "no amount"),
            ("1", "gold", "r", "bucket"),
            ("1", "trial", " ", "reference is missing"),
            ("1", "trial", "a\nb", "line breaks"),
            ("1", "trial", &"x".repeat(129), "128"),
        ] {
            let error = grant(units, bucket, reference).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
        let key = |days: &str| {
            let fields = fields(&[("command", "key_create"), ("account", account), ("days", days)]);
            match fields.command(UnixMillis(5)) {
                Ok(AdminCommand::KeyCreate { expires_at, .. }) => Ok(expires_at.map(|at| at.0)),
                other => Err(other.map(|_| ())),
            }
        };
        assert_eq!(key(""), Ok(None));
        assert_eq!(key("2"), Ok(Some(172_800_005)));
        assert!(["0", "-1", "x", "18446744073709551615"].iter().all(|days| key(days).is_err()));
        assert!(fields(&[("command", "backup")]).command(UnixMillis(0)).is_err());
    }

    #[test]
    fn a_form_comes_back_to_this_site() {
        for (back, expect) in [
            ("/accounts", "/accounts"),
            ("//evil.example", "/"),
            ("/\\evil.example", "/"),
            ("/\t/evil.example", "/"),
            ("/a\r\nb: c", "/"),
            ("/\u{a0}/evil.example", "/"),
            ("/accounts/1?entries_after=9", "/accounts/1?entries_after=9"),
            ("https://evil.example", "/"),
            ("", "/"),
        ] {
            assert_eq!(fields(&[("back", back)]).back(None), expect);
        }
    }

    /// Forms are left out by `role`; the command itself decides what it needs.
    #[test]
    fn a_form_needs_the_role_of_its_command() {
        let id = "00000000-0000-4000-8000-000000000001";
        let values = [
            ("id", id),
            ("account", id),
            ("period", "day"),
            ("units", "1"),
            ("bucket", "trial"),
            ("reference", "r"),
            ("name", "n"),
            ("release", "r"),
            ("path", "/p"),
            ("reason", "r"),
            ("number", "1"),
            ("input", "1"),
        ];
        let commands = [
            "account_change",
            "account_budget",
            "account_erase_answers",
            "account_suspend",
            "account_close",
            "account_resume",
            "account_create",
            "key_create",
            "key_rotate",
            "key_revoke",
            "key_budget",
            "credit_grant",
            "credit_debit",
            "model_load",
            "model_unload",
            "model_price",
            "job_stop",
            "model_pull",
            "model_add",
            "qualify_quick",
            "qualify_full",
            "model_accept",
            "model_remove",
        ];
        for name in commands {
            let all = values.into_iter().chain([("command", name)]);
            let command = fields(&all.collect::<Vec<_>>()).command(UnixMillis(0)).unwrap();
            for one in [Role::Read, Role::Operate, Role::Money] {
                let actor = Actor::with_roles("ann".into(), BTreeSet::from([one]));
                assert_eq!(actor.may(&command).is_ok(), one == role(name), "{name}, {one:?}");
            }
        }
    }
}
