//! The operator's commands and listener: they answer the same with and without a running node, and
//! the public listener offers none of them.

use crate::process::{Customer, Folder, Served, eventually, get, request};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use uuid::Uuid;

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value} is no string"))
}

/// Runs every kind of operator command once and returns the documents in order.
fn tour(folder: &Folder) -> Vec<Value> {
    let run =
        |line: &str, id: &str| folder.json(&line.replace("ID", id).split(' ').collect::<Vec<_>>());
    let account = run("accounts create --name acme --trial 5_000_000 --premium 7", "");
    let id = text(&account["id"]).to_owned();
    let key = run("keys create --account ID --label laptop --expires-in 30d", &id);
    let application = run("applications create --account ID --name phone", &id);
    let token =
        run("applications token --application ID --expires-in 12h", text(&application["id"]));
    let grant = format!("credits grant --account {id} --bucket premium --units 100 --reference");
    let grant: Vec<&str> = grant.split(' ').chain(["invoice 1"]).collect();
    let debit = ["credits", "debit", "--account", &id, "--bucket", "premium"];
    let copy = folder.path().join("copy.ledger");
    let mut documents = vec![
        account,
        key.clone(),
        application,
        token.clone(),
        folder.json(&grant),
        folder.json(&grant),
    ];
    documents.extend(
        [
            &["accounts", "list"][..],
            &["accounts", "show", &id],
            &["accounts", "suspend", &id],
            &["accounts", "resume", &id],
            &["accounts", "change", &id, "--name", "acme & co"],
            &[&debit[..], &["--units", "5", "--reference", "called back"]].concat(),
            &["keys", "list", "--account", &id],
            &["keys", "revoke", text(&key["id"])],
            &["applications", "list"],
            &["applications", "list", "--account", &id],
            &["applications", "revoke", text(&token["id"])],
            &["credits", "show", "--account", &id],
            &["credits", "statement", "--account", &id],
            &["requests", "list", "--account", &id],
            &["requests", "list", "--account", &id, "--state", "running"],
            &["ledger", "audit"],
            &["ledger", "backup", copy.to_str().unwrap()],
        ]
        .map(|arguments| folder.json(arguments)),
    );
    documents
}

/// A document without the parts that differ between two runs: ids, secrets, times, hashes, paths,
/// sizes.
fn steady(value: &Value) -> Value {
    const CHANGING: [&str; 7] = ["secret", "hint", "hash", "path", "bytes", "at", "sequence"];
    let changes = |name: &str| {
        name == "id" || name.ends_with("_id") || name.ends_with("_at") || CHANGING.contains(&name)
    };
    match value {
        Value::Object(fields) => {
            let kept = |(name, value): (&String, &Value)| {
                let shown =
                    if changes(name) && !value.is_null() { json!("…") } else { steady(value) };
                (name.clone(), shown)
            };
            Value::Object(fields.iter().map(kept).collect())
        }
        Value::Array(rows) => Value::Array(rows.iter().map(steady).collect()),
        other => other.clone(),
    }
}

#[test]
fn an_account_goes_by_its_name_while_no_other_has_it() {
    let folder = Folder::initialised();
    let create = |trial| folder.json(&["accounts", "create", "--name", "acme", "--trial", trial]);
    let first = create("5");
    assert_eq!(first["same_name"], json!([]));
    assert_eq!(folder.json(&["accounts", "show", "acme"])["id"], first["id"]);
    let grant = ["credits", "grant", "--account", "acme", "--bucket", "trial", "--units", "7"];
    folder.json(&[&grant[..], &["--reference", "invoice"]].concat());
    assert_eq!(folder.json(&["credits", "show", "--account", "acme"])["trialUnits"], "12");
    for list in ["keys", "applications", "requests"] {
        folder.json(&[list, "list", "--account", "acme"]);
    }
    assert_eq!(create("6")["same_name"], json!([first["id"]]));
    let said = folder.run(&["accounts", "create", "--name", "acme"]).stdout;
    assert!(said.contains("Another account has this name"), "{said}");
    let message = folder.fails(&["accounts", "suspend", "acme"], 1);
    assert!(message.contains("3 accounts are called"), "{message}");
    assert!(message.contains(text(&first["id"])), "{message}");
    assert_eq!(folder.json(&["accounts", "show", text(&first["id"])])["status"], "active");
}

#[test]
fn a_running_node_gives_the_same_answers() {
    let folder = Folder::ready();
    let stopped = tour(&folder);
    let folder = Folder::ready();
    let node = folder.serve();
    let running = tour(&folder);
    for (stopped, running) in stopped.iter().zip(&running) {
        assert_eq!(steady(stopped), steady(running));
    }
    assert!(node.terminate().success());
}

#[test]
fn documents_have_the_promised_fields() {
    let folder = Folder::initialised();
    let documents = tour(&folder);
    let [account, key, application, token, grant, again] = &documents[..6] else { panic!() };
    assert_eq!(
        (&account["trialUnits"], &account["premiumUnits"]),
        (&json!("5000000"), &json!("7"))
    );
    assert_eq!((&account["status"], &account["plan"]), (&json!("active"), &json!("default")));
    assert!(
        text(&key["secret"]).starts_with("cresset_key_")
            && text(&token["secret"]).starts_with("cresset_app_")
    );
    let lifetime = key["expires_at"].as_u64().unwrap() - key["created_at"].as_u64().unwrap();
    assert!(lifetime.abs_diff(30 * 86_400) <= 2, "times are Unix seconds: {key}");
    assert_eq!(application["name"], "phone");
    assert_eq!(grant["premiumUnits"], "107");
    assert_eq!((&grant["repeated"], &again["repeated"]), (&json!(false), &json!(true)));
    assert_eq!(grant["premiumUnits"], again["premiumUnits"], "the same grant twice is one grant");
    let audit = &documents[21];
    assert_eq!((&audit["ok"], &audit["violations"]), (&json!(true), &json!([])));
    assert!(audit["checked"]["entries"].as_u64().unwrap() >= 3);
}

#[test]
fn secrets_are_shown_once() {
    let folder = Folder::initialised();
    let Customer { account, key, .. } = folder.customer(1);
    let listed = folder.json(&["keys", "list", "--account", &account]).to_string();
    assert!(!listed.contains(&key));
    let random = &key["cresset_key_".len()..];
    let stored = std::fs::read(folder.path().join("ledger.redb")).unwrap();
    let found = stored.windows(random.len()).any(|window| window == random.as_bytes());
    assert!(!found, "the secret itself is not in the ledger");
}

#[test]
fn a_reference_buys_one_grant() {
    let folder = Folder::initialised();
    let Customer { account, .. } = folder.customer(1);
    let grant = |units: &'static str| {
        [
            "credits",
            "grant",
            "--account",
            &account,
            "--bucket",
            "trial",
            "--units",
            units,
            "--reference",
            "r",
        ]
        .map(str::to_owned)
    };
    let run = |units| folder.run(&grant(units).iter().map(String::as_str).collect::<Vec<_>>()).code;
    assert_eq!(run("5"), Some(0));
    assert_eq!(run("5"), Some(0));
    assert_eq!(run("6"), Some(1), "another amount under a used reference");
    assert_eq!(run("0"), Some(1), "nothing to grant");
    assert_eq!(folder.json(&["credits", "show", "--account", &account])["trialUnits"], "6");
}

#[test]
fn a_debit_takes_what_is_free_once() {
    let folder = Folder::initialised();
    let Customer { account, .. } = folder.customer(10);
    let debit = |units: &str| {
        let debit = ["credits", "debit", "--account", &account, "--bucket", "trial"];
        folder.run(&[&debit[..], &["--units", units, "--reference", "called back"]].concat())
    };
    let too_much = debit("12");
    assert_eq!(too_much.code, Some(1));
    assert!(too_much.stderr.contains("10 microcredits of this kind"), "{}", too_much.stderr);
    assert_eq!(debit("4").code, Some(0));
    assert!(debit("4").stdout.contains("nothing was changed"));
    assert_eq!(debit("5").code, Some(1), "another amount under a used reference");
    assert_eq!(folder.json(&["credits", "show", "--account", &account])["trialUnits"], "6");
    let statement = folder.run(&["credits", "statement", "--account", &account]).stdout;
    assert!(statement.contains("debit") && statement.contains("called back"), "{statement}");
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

/// Today's month and the next one, as a person types them.
fn months() -> [String; 2] {
    let now = chrono::Utc::now();
    [now, now + chrono::Months::new(1)].map(|at| at.format("%Y-%m").to_string())
}

#[test]
fn a_month_is_summed_up_by_model_and_key() {
    let folder = Folder::ready();
    let Customer { account, key, key_id } = folder.customer(1_000_000);
    let node = folder.serve();
    let second = folder.json(&["keys", "create", "--account", &account]);
    let [other, other_id] = ["secret", "id"].map(|name| second[name].as_str().unwrap());
    let body = json!({ "model": node.model, "max_tokens": 3, "ignore_eos": true,
                       "messages": [{ "role": "user", "content": "hi" }] });
    let mut charged = [0; 2];
    for (index, key) in [&*key, &*key, other].into_iter().enumerate() {
        let answer = node.chat(key, &Uuid::new_v4().to_string(), &body).finish().json();
        let units: u64 = answer["credits"]["chargedUnits"].as_str().unwrap().parse().unwrap();
        charged[usize::from(index == 2)] += units;
    }
    let reference = "an \"invoice\", unpaid";
    let debit = ["credits", "debit", "--bucket", "trial", "--units", "5", "--reference", reference];
    folder.json(&[&debit[..], &["--account", &account]].concat());
    let of = ["credits", "statement", "--account", &account];
    let [month, next] = months();

    let sums = folder.json(&[&of[..], &["--month", &month, "--summary"]].concat());
    for (key, requests, units) in [(&*key_id, 2, charged[0]), (other_id, 1, charged[1])] {
        let rows = sums["data"].as_array().unwrap();
        let row = rows.iter().find(|row| row["credential_id"] == key).unwrap();
        assert_eq!((&row["model"], &row["requests"]), (&json!("tiny"), &json!(requests)), "{row}");
        assert_eq!(row["completion_tokens"], 3 * requests);
        assert_eq!(row["chargedUnits"], units.to_string());
    }
    let csv = folder.run(&[&of[..], &["--month", &month, "--csv"]].concat()).stdout;
    let rows: Vec<csv::StringRecord> =
        csv::Reader::from_reader(csv.as_bytes()).records().map(Result::unwrap).collect();
    let total: i64 = rows.iter().map(|row| row[3].parse::<i64>().unwrap()).sum();
    let left = folder.json(&["credits", "show", "--account", &account])["trialUnits"].clone();
    assert_eq!(json!(total.to_string()), left, "the changes add up to the balance");
    assert!(rows.iter().any(|row| &row[2] == "debit" && &row[11] == reference), "{csv}");
    assert!(rows.iter().any(|row| row[12] == key_id), "{csv}");
    for period in [["--month", &*next], ["--from", &*next], ["--until", &*month]] {
        let none = folder.run(&[&of[..], &period, &["--csv"]].concat()).stdout;
        assert_eq!(none.lines().count(), 1, "{period:?}: {none}");
    }
    assert!(node.terminate().success());
}

#[test]
fn an_account_gets_another_name_and_plan() {
    let folder = Folder::initialised();
    let Customer { account, .. } = folder.customer(1);
    folder.fails(&["accounts", "change", &account], 2);
    assert!(folder.fails(&["accounts", "change", &account, "--plan", "gold"], 1).contains("gold"));
    let changed = ["accounts", "change", &account, "--name", "Acme & Co", "--plan", "default"];
    assert_eq!(folder.json(&changed)["name"], "Acme & Co");
    assert_eq!(folder.json(&["accounts", "show", "Acme & Co"])["id"], account);
}

#[test]
fn a_key_is_replaced_while_the_old_one_still_works() {
    let folder = Folder::ready();
    let Customer { key, key_id: id, .. } = folder.customer(1);
    let new = folder.json(&["keys", "rotate", &id, "--grace", "1h"]);
    assert_eq!(new["replaces"], id);
    let node = folder.serve();
    for key in [key.as_str(), new["secret"].as_str().unwrap()] {
        assert_eq!(node.get(key, "/v1/me").status, 200);
    }
    let soon = folder.json(&["keys", "rotate", &id, "--grace", "1s"]);
    assert!(soon["replaced_until"].as_u64() < new["replaced_until"].as_u64());
    eventually("the old key has ended", || node.get(&key, "/v1/me").status == 401);
    let later = folder.json(&["keys", "rotate", &id, "--grace", "1h"]);
    assert_eq!(later["replaced_until"], soon["replaced_until"], "an end is never put off");
    folder.json(&["keys", "revoke", &id]);
    assert!(folder.fails(&["keys", "rotate", &id], 1).contains("keys create"));
}

#[test]
fn a_backup_brings_back_what_was() {
    let folder = Folder::initialised();
    let Customer { account, .. } = folder.customer(1_000);
    let copy = folder.path().join("copy.ledger");
    let copy = copy.to_str().unwrap();
    folder.json(&["ledger", "backup", copy]);
    assert!(
        folder.fails(&["ledger", "backup", copy], 1).contains("exists"),
        "a backup is never written over"
    );
    folder.json(&[
        "credits",
        "grant",
        "--account",
        &account,
        "--bucket",
        "trial",
        "--units",
        "1",
        "--reference",
        "later",
    ]);
    folder.json(&["ledger", "restore", copy]);
    assert_eq!(folder.json(&["credits", "show", "--account", &account])["trialUnits"], "1000");
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}

#[test]
fn a_restore_says_what_it_kept_and_what_returned() {
    let folder = Folder::ready();
    let (customer, other) = (folder.customer(1_000), folder.customer(1_000));
    let copy = folder.path().join("copy.ledger");
    let restore = ["ledger", "restore", copy.to_str().unwrap()];
    folder.json(&["ledger", "backup", copy.to_str().unwrap()]);
    folder.json(&["keys", "revoke", &customer.key_id]);
    folder.json(&["accounts", "suspend", &other.account]);
    let later = folder.customer(1_000);
    let report = folder.json(&restore);
    let ids = |report: &Value, name: &str| -> Vec<String> {
        let rows = report[name].as_array().unwrap_or_else(|| panic!("no {name}: {report}"));
        rows.iter().map(|row| text(&row["id"]).to_owned()).collect()
    };
    let found = ["kept_revoked", "kept_suspended", "valid_again"].map(|name| ids(&report, name));
    assert_eq!(found, [vec![customer.key_id.clone()], vec![other.account.clone()], vec![]]);
    assert_eq!(report["gone"], json!({ "accounts": 1, "credentials": 1, "requests": 0 }));
    for file in report["replaced_files"].as_array().unwrap() {
        assert!(text(file).ends_with(".replaced-1") && std::path::Path::new(text(file)).exists());
    }
    let node = folder.serve();
    for key in [&customer.key, &other.key, &later.key] {
        assert_eq!(node.get(key, "/v1/me").status, 401);
    }
    assert!(node.terminate().success());
    std::fs::write(folder.path().join("ledger.redb"), "damaged").unwrap();
    let told = folder.run(&restore);
    assert_eq!(told.code, Some(0), "{told:?}");
    for part in [".replaced-2", "could not be read", "valid again", &customer.key_id, &other.key_id]
    {
        assert!(told.stdout.contains(part), "no {part}: {}", told.stdout);
    }
}

#[test]
fn an_account_is_created_once_a_reference() {
    const CREATE: [&str; 6] = ["accounts", "create", "--name", "acme", "--reference", "order 17"];
    let folder = Folder::initialised();
    let same = [&CREATE[..], &["--trial", "5", "--premium", "7"]].concat();
    let first = folder.json(&same);
    let again = folder.json(&same);
    assert_eq!((&first["repeated"], &again["repeated"]), (&json!(false), &json!(true)));
    let shown = |account: &Value| {
        let amounts = [&account["trialUnits"], &account["premiumUnits"]];
        (text(&account["id"]).to_owned(), amounts.map(|units| text(units).to_owned()))
    };
    assert_eq!(shown(&first), shown(&again));
    for other in [&["--trial", "6", "--premium", "7"][..], &["--trial", "5"], &[]] {
        let why = folder.fails(&[&CREATE[..], other].concat(), 1);
        assert!(why.contains("order 17") && why.contains("another --reference"), "{why}");
    }
    // Nothing is left of an account whose opening balance cannot be granted.
    let most = "9007199254740991";
    let whole = ["accounts", "create", "--name", "large", "--trial", most, "--premium", "1"];
    assert!(folder.fails(&whole, 1).contains("smaller amount"));
    let accounts = folder.json(&["accounts", "list"]);
    assert_eq!(accounts["data"].as_array().unwrap().len(), 1, "{accounts}");
    let grant = ["credits", "grant", "--account", text(&first["id"]), "--bucket", "trial"];
    let grant = [&grant[..], &["--units", "3", "--reference", "later"]].concat();
    assert_eq!(folder.json(&grant)["repeated"], false);
    assert!(folder.run(&grant).stdout.contains("nothing was changed"));
    assert_eq!(folder.json(&grant)["trialUnits"], "8");
}

#[test]
fn a_ledger_is_not_replaced_under_a_node() {
    let folder = Folder::ready();
    let copy = folder.path().join("copy.ledger");
    folder.json(&["ledger", "backup", copy.to_str().unwrap()]);
    let _node = folder.serve();
    let message = folder.fails(&["ledger", "restore", copy.to_str().unwrap()], 1);
    assert!(message.contains("stop the node"), "{message}");
}

#[test]
fn the_socket_is_the_owners_alone_and_goes_with_the_node() {
    let folder = Folder::ready();
    let socket = folder.path().join("operator.sock");
    let node = folder.serve();
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(node.terminate().success());
    assert!(!socket.exists());
    // The socket of a node that has ended does not keep another one from starting.
    let node = folder.serve();
    node.kill();
    assert!(socket.exists());
    folder.json(&["accounts", "list"]);
    let node = folder.serve();
    assert!(node.terminate().success());
}

#[test]
fn the_operator_listener_tells_health_readiness_and_metrics() {
    let folder = Folder::ready();
    let node = folder.serve();
    let status = |path: &str| get(&node.operator, path).status;
    assert_eq!((status("/healthz"), status("/readyz"), status("/nothing")), (200, 200, 404));
    let metrics = |accept: &str| {
        let head = format!("GET /metrics HTTP/1.1\r\nAccept: {accept}\r\n");
        let answer = request(&node.operator, &head, "").finish();
        (answer.headers["content-type"].clone(), answer.body)
    };
    let (kind, open) = metrics("application/openmetrics-text; version=1.0.0, text/plain; q=0.5");
    assert_eq!(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8");
    assert!(
        open.contains("# TYPE cresset_idempotent_replays counter\n") && open.ends_with("# EOF\n")
    );
    let (kind, older) = metrics("text/plain; version=0.0.4");
    assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
    assert!(older.contains("# TYPE cresset_idempotent_replays_total counter\n"), "{older}");
    assert!(!older.contains("# EOF"), "{older}");
    assert_eq!(folder.run(&["status", "--ready"]).code, Some(0));
    let status = folder.json(&["status"]);
    assert_eq!((&status["ready"], &status["models"][0]["name"]), (&json!(true), &json!("tiny")));
    assert_eq!(status["models"][0]["kv_dtype"], "f16 beside quantised weights");
    assert_eq!(status["listen"], node.listen.as_str());
}

#[test]
fn nothing_of_the_operator_is_public() {
    let folder = Folder::ready();
    let Customer { key, .. } = folder.customer(1_000_000);
    let node = folder.serve();
    for path in ["/healthz", "/readyz", "/metrics", "/command"] {
        assert_eq!(get(&node.listen, path).status, 401, "{path} without a credential");
        assert_eq!(node.get(&key, path).status, 404, "{path} with one");
        let post =
            request(&node.operator, "POST /command HTTP/1.1\r\n", r#"{"command":"account_list"}"#)
                .finish();
        assert_eq!(post.status, 401, "commands from elsewhere need a token");
    }
}

fn endless(node: &Served) -> Value {
    json!({ "model": node.model, "messages": [{ "role": "user", "content": "go on" }], "stream": true,
            "max_tokens": 1_500, "ignore_eos": true })
}

#[test]
fn revoking_a_key_ends_what_runs_under_it() {
    let folder = Folder::ready();
    let Customer { account, key, key_id } = folder.customer(100_000_000);
    let node = folder.serve();
    let id = uuid::Uuid::new_v4().to_string();
    let mut stream = node.chat(&key, &id, &endless(&node));
    stream.read_until("data:");
    folder.json(&["keys", "revoke", &key_id]);
    assert_eq!(node.get(&key, "/v1/me").status, 401);
    let state = || folder.json(&["requests", "show", &id])["state"].clone();
    eventually("the request is cancelled", || state() == "cancelled");
    assert_eq!(folder.json(&["credits", "show", "--account", &account])["reservedUnits"], "0");
}

#[test]
fn suspending_an_account_refuses_its_keys() {
    let folder = Folder::ready();
    let Customer { account, key, .. } = folder.customer(1_000_000);
    let node = folder.serve();
    let me = || node.get(&key, "/v1/me").status;
    assert_eq!(me(), 200);
    folder.json(&["accounts", "suspend", &account]);
    assert_eq!(me(), 401);
    folder.json(&["accounts", "resume", &account]);
    assert_eq!(me(), 200);
}

#[test]
fn requests_are_listed_shown_and_cancelled() {
    let folder = Folder::ready();
    let Customer { account, key, .. } = folder.customer(100_000_000);
    let node = folder.serve();
    let id = uuid::Uuid::new_v4().to_string();
    let body = json!({ "model": node.model, "messages": [{ "role": "user", "content": "hello" }], "max_tokens": 5 });
    let answer = node.chat(&key, &id, &body).finish().json();
    let shown = folder.json(&["requests", "show", &id]);
    let public = node.get(&key, &format!("/v1/requests/{id}")).json();
    for (name, value) in public.as_object().unwrap() {
        assert_eq!(&shown[name], value, "the operator sees the public {name}");
    }
    assert_eq!(shown["account_id"], account.as_str());
    assert_eq!(
        shown["attempts"][0]["usage"]["completion_tokens"],
        answer["usage"]["completion_tokens"]
    );
    let cancelled = folder.json(&["requests", "cancel", &id]);
    assert_eq!(cancelled["state"], "completed", "what has ended stays as it ended");
    let listed = folder.json(&["requests", "list", "--account", &account, "--state", "completed"]);
    assert_eq!(listed["data"][0]["id"], id.as_str());
    let none = folder.json(&["requests", "list", "--account", &account, "--state", "failed"]);
    assert_eq!(none["data"], json!([]));
}

#[test]
fn a_closed_account_has_no_keys_and_no_credits() {
    let folder = Folder::ready();
    let Customer { account, key, .. } = folder.customer(1_000_000);
    let other = folder.customer(5);
    let node = folder.serve();
    let running = node.chat(&key, &Uuid::new_v4().to_string(), &endless(&node));
    assert_eq!(running.status, 200);
    let closed = folder.json(&["accounts", "close", &account]);
    assert_eq!((&closed["status"], &closed["in_flight"]), (&json!("suspended"), &json!(0)));
    assert_eq!((&closed["trialUnits"], &closed["premiumUnits"]), (&json!("0"), &json!("0")));
    assert_eq!(closed["revoked_credentials"], 1);
    let taken: u64 = text(&closed["takenTrialUnits"]).parse().unwrap();
    assert!((1..1_000_000).contains(&taken), "what it ran was charged: {taken}");
    assert!(running.rest().contains("request_cancelled"));
    assert_eq!(node.get(&key, "/v1/me").status, 401);
    let again = folder.json(&["accounts", "close", &account]);
    assert_eq!(
        (&again["revoked_credentials"], &again["takenTrialUnits"]),
        (&json!(0), &json!("0"))
    );
    folder.json(&["accounts", "resume", &account]);
    assert_eq!(node.get(&key, "/v1/me").status, 401, "a revoked key stays so");
    let kept = folder.json(&["accounts", "close", &other.account, "--keep-credits"]);
    assert_eq!(kept["trialUnits"], "5");
    assert!(node.terminate().success());
    assert_eq!(folder.json(&["ledger", "audit"])["ok"], true);
}
