//! The expected answer of each command, in the order in which a ledger would receive them.

use super::check;

#[test]
fn a_request_reserves_then_is_charged_what_it_used() {
    check(
        "admit a r 1 k 10 30        -> admitted #1 queued 40+0
         balance a                  -> 100-0-40 100-0-0 in flight 1
         start a r 1                -> #1 running 40+0
         start a r 1                -> #1 running 40+0
         settle a r 1 10 4 7 stop   -> #1 completed 13+0
         balance a                  -> 100-13-0 100-0-0 in flight 0",
    );
}

#[test]
fn trial_is_spent_before_premium() {
    check(
        "admit a r 1 k 50 100       -> admitted #1 queued 100+50
         settle a r 1 50 0 70 stop  -> #1 completed 100+20
         admit a s 2 k 1 1          -> admitted #1 queued 0+2
         balance a                  -> 100-100-0 100-20-2 in flight 1",
    );
}

#[test]
fn an_attempt_ends_once() {
    check(
        "admit a r 1 k 10 10         -> admitted #1 queued 20+0
         settle a r 1 10 0 5 length  -> #1 completed 15+0
         settle a r 1 10 0 9 stop    -> already #1 completed 15+0
         release a r 1 failed        -> already #1 completed 15+0
         start a r 1                 -> already #1 completed 15+0
         cancel a r                  -> already #1 completed 15+0
         admit a s 2 k 10 10         -> admitted #1 queued 20+0
         release a s 2 queued        -> #1 cancelled 0+0
         settle a s 2 10 0 5 stop    -> already #1 cancelled 0+0
         balance a                   -> 100-15-0 100-0-0 in flight 0",
    );
}

#[test]
fn a_client_that_ends_a_running_request_pays_for_what_ran() {
    check(
        "admit a r 1 k 10 30             -> admitted #1 queued 40+0
         start a r 1                     -> #1 running 40+0
         cancel a r                      -> #1 running 40+0 cancelling
         cancel a r                      -> #1 running 40+0 cancelling
         settle a r 1 10 0 3 cancelled   -> #1 cancelled 13+0 cancelling
         cancel a r                      -> already #1 cancelled 13+0 cancelling
         admit a r 2 k 10 30             -> existing #1 cancelled 13+0 cancelling",
    );
}

#[test]
fn a_format_that_costs_too_much_is_paid_for_and_never_run_again() {
    check(
        "admit a r 1 k 10 30          -> admitted #1 queued 40+0
         start a r 1                  -> #1 running 40+0
         settle a r 1 10 0 3 costly   -> #1 failed 13+0
         settle a r 1 10 0 3 costly   -> already #1 failed 13+0
         admit a r 2 k 10 30          -> refused FormatTooCostly",
    );
}

#[test]
fn a_failure_of_the_node_is_free_and_may_be_tried_again() {
    check(
        "admit a r 1 k 10 30            -> admitted #1 queued 40+0
         start a r 1                    -> #1 running 40+0
         release a r 1 failed           -> #1 failed 0+0
         admit a r 2 k 10 30 other      -> refused FingerprintMismatch
         admit a r 2 k 10 30            -> admitted #2 queued 40+0
         release a r 1 failed           -> already #2 queued 40+0
         release a r 2 failed           -> #2 failed 0+0
         admit a r 2 k 10 30            -> refused AttemptsExhausted
         admit a r 3 k 10 30            -> admitted #3 queued 40+0
         release a r 3 failed           -> #3 failed 0+0
         admit a r 4 k 10 30            -> refused AttemptsExhausted
         balance a                      -> 100-0-0 100-0-0 in flight 0",
    );
}

#[test]
fn an_attempt_that_was_turned_away_does_not_count() {
    check(
        "admit a r 1 k 10 30            -> admitted #1 queued 40+0
         release a r 1 overloaded       -> #1 failed 0+0
         admit a r 2 k 10 30            -> admitted #2 queued 40+0
         start a r 2                    -> #2 running 40+0
         release a r 2 draining         -> #2 failed 0+0
         admit a r 3 k 10 30            -> admitted #3 queued 40+0
         release a r 3 unreachable      -> #3 failed 0+0
         admit a r 4 k 10 30            -> admitted #4 queued 40+0
         start a r 4                    -> #4 running 40+0
         release a r 4 unreachable      -> #4 failed 0+0
         admit a r 5 k 10 30            -> admitted #5 queued 40+0
         release a r 5 failed           -> #5 failed 0+0
         admit a r 6 k 10 30            -> admitted #6 queued 40+0
         release a r 6 failed           -> #6 failed 0+0
         admit a r 7 k 10 30            -> refused AttemptsExhausted",
    );
}

#[test]
fn a_request_that_was_only_turned_away_is_forgotten() {
    check(
        "admit a r 1 k 10 30            -> admitted #1 queued 40+0
         release a r 1 away             -> #1 failed 0+0
         release a r 1 away             -> refused RequestNotFound
         cancel a r                     -> refused RequestNotFound
         balance a                      -> 100-0-0 100-0-0 in flight 0
         admit a r 2 k 10 30 other      -> admitted #1 queued 40+0
         release a r 2 failed           -> #1 failed 0+0
         admit a r 3 k 10 30 other      -> admitted #2 queued 40+0
         release a r 3 away             -> #2 failed 0+0
         admit a r 4 k 10 30            -> refused FingerprintMismatch
         admit a s 5 k 10 30            -> admitted #1 queued 40+0
         start a s 5                    -> #1 running 40+0
         release a s 5 away             -> #1 failed 0+0
         admit a s 6 k 10 30 other      -> refused FingerprintMismatch",
    );
}

#[test]
fn an_attempt_costs_what_its_own_prices_say() {
    check(
        "prices 2 3 2 1                 -> ok
         admit a r 1 k 10 20            -> admitted #1 queued 50+0
         prices 3 1 1 4                 -> ok
         admit a s 2 k 10 5             -> admitted #1 queued 30+0
         settle a r 1 10 4 6 stop       -> #1 completed 32+0
         release a s 2 failed           -> #1 failed 0+0
         prices 4 0 0 2                 -> ok
         admit a s 3 k 10 5             -> admitted #2 queued 10+0
         prices 5 9 9 9                 -> ok
         settle a s 3 10 0 5 cancelled  -> #2 cancelled 10+0
         balance a                      -> 100-42-0 100-0-0 in flight 0",
    );
}

#[test]
fn one_id_is_one_request() {
    check(
        "admit a r 1 k 10 30            -> admitted #1 queued 40+0
         admit a r 1 k 10 30            -> admitted #1 queued 40+0
         admit a r 2 k 10 30            -> existing #1 queued 40+0
         admit a r 2 k 10 30 other      -> refused FingerprintMismatch
         settle a r 1 10 0 5 stop       -> #1 completed 15+0
         admit a r 2 k 10 30            -> existing #1 completed 15+0
         admit a r 1 k 10 30            -> existing #1 completed 15+0
         archive a r                    -> ok
         admit a r 2 k 10 30            -> refused ResultExpired
         admit a r 2 k 10 30 other      -> refused FingerprintMismatch
         cancel a r                     -> already #1 completed 15+0
         settle a r 1 10 0 5 stop       -> already #1 completed 15+0
         balance a                      -> 100-15-0 100-0-0 in flight 0",
    );
}

#[test]
fn a_repeat_is_answered_whatever_the_balance_and_the_limit() {
    check(
        "admit a r 1 k 100 100 i 1      -> admitted #1 queued 100+100
         admit a r 2 k 100 100 i 1      -> existing #1 queued 100+100
         admit a s 3 k 1 1 i 1          -> refused ConcurrencyLimit 1
         admit a s 3 k 1 1 i 2          -> refused CreditsReserved 2 0
         settle a r 1 100 0 100 stop    -> #1 completed 100+100
         admit a r 2 k 100 100 i 1      -> existing #1 completed 100+100
         admit a s 3 k 1 1              -> refused InsufficientCredits 2 0
         grant a premium 2 more         -> done
         admit a s 3 k 1 1 changed      -> admitted #1 queued 0+2",
    );
}

#[test]
fn scopes_are_apart() {
    check(
        "app x a                   -> done
         app y a                   -> done
         key tx a/x                -> done
         key ty a/y                -> done
         admit a r 1 k 1 1         -> admitted #1 queued 2+0
         admit a/x r 2 tx 1 1 b    -> admitted #1 queued 2+0
         admit a/y r 3 ty 1 1 c    -> admitted #1 queued 2+0
         admit a/x r 4 ty 1 1 b    -> refused CredentialInvalid
         admit a r 4 tx 1 1        -> refused CredentialInvalid
         admit a/x s 4 k 1 1       -> refused CredentialInvalid
         account b                 -> done
         key kb b                  -> done
         admit b r 5 kb 1 1        -> refused InsufficientCredits 2 0
         admit a r 5 kb 1 1        -> refused CredentialInvalid
         balance a                 -> 100-0-6 100-0-0 in flight 3",
    );
}

#[test]
fn a_credential_must_be_valid_now() {
    check(
        "key short a 2000          -> done
         at 1999                   -> ok
         admit a r 1 short 1 1     -> admitted #1 queued 2+0
         at 2000                   -> ok
         admit a s 2 short 1 1     -> refused CredentialInvalid
         admit a r 1 short 1 1     -> refused CredentialInvalid
         admit a s 2 k 1 1         -> admitted #1 queued 2+0
         revoke k                  -> done
         revoke k                  -> done
         admit a t 3 k 1 1         -> refused CredentialInvalid
         key k2 a                  -> done
         suspend a                 -> done
         admit a t 3 k2 1 1        -> refused CredentialInvalid
         admit a t 3 nobody 1 1    -> refused CredentialInvalid
         settle a r 1 1 0 1 stop   -> #1 completed 2+0",
    );
}

#[test]
fn commands_that_name_no_row_are_refused() {
    check(
        "start a r 1                -> refused RequestNotFound
         settle a r 1 1 0 1 stop    -> refused RequestNotFound
         release a r 1 failed       -> refused RequestNotFound
         cancel a r                 -> refused RequestNotFound
         revoke none                -> refused CredentialNotFound
         suspend none               -> refused AccountNotFound
         grant none trial 1 x       -> refused AccountNotFound
         app x none                 -> refused AccountNotFound
         key z none                 -> refused AccountNotFound
         key z a/none               -> refused ApplicationNotFound
         admit a r 1 k 1 1          -> admitted #1 queued 2+0
         settle a r 9 1 0 1 stop    -> refused RequestNotFound",
    );
}

#[test]
fn a_repeated_command_changes_nothing() {
    check(
        "account a                       -> repeated
         account a other                 -> refused IdTaken
         app x a                         -> done
         app x a                         -> repeated
         account b                       -> done
         app x b                         -> refused IdTaken
         key k a                         -> repeated
         grant a trial 100 t             -> repeated
         grant a trial 101 t             -> refused ReferenceReused
         grant a premium 100 t           -> refused ReferenceReused
         grant a trial 9007199254740791 u -> done
         grant a trial 1 v               -> refused AmountOverflow
         grant a premium 1 v             -> refused AmountOverflow
         balance a                       -> 9007199254740891-0-0 100-0-0 in flight 0",
    );
}

#[test]
fn a_debit_takes_what_is_not_reserved_once() {
    check(
        "balance a                   -> 100-0-0 100-0-0 in flight 0
         debit a trial 30 back       -> done
         debit a trial 30 back       -> repeated
         debit a trial 31 back       -> refused ReferenceReused
         grant a trial 30 back       -> refused ReferenceReused
         debit a trial 100 t         -> refused ReferenceReused
         admit a r 1 k 20 20         -> admitted #1 queued 40+0
         debit a trial 31 more       -> refused DebitTooLarge { needed: Microcredits(31), available: Microcredits(30) }
         debit a trial 30 more       -> done
         debit a premium 101 more2   -> refused DebitTooLarge { needed: Microcredits(101), available: Microcredits(100) }
         debit none trial 1 x        -> refused AccountNotFound
         settle a r 1 20 0 20 stop   -> #1 completed 40+0
         balance a                   -> 100-100-0 100-0-0 in flight 0",
    );
}

#[test]
fn an_account_may_change_its_name_and_its_plan() {
    check(
        "change a other -            -> done
         account a                   -> refused IdTaken
         change a a basic            -> done
         account a                   -> repeated
         change none x -             -> refused AccountNotFound
         expire k 1                  -> done
         admit a r 1 k 1 1           -> refused CredentialInvalid
         expire none 1               -> refused CredentialNotFound",
    );
}

#[test]
fn an_account_comes_with_its_opening_balances_or_not_at_all() {
    check(
        "account b basic 5 7                       -> done
         balance b                                 -> 5-0-0 7-0-0 in flight 0
         account b basic 5 7                       -> repeated
         account b basic 5 8                       -> refused IdTaken
         account b basic 0 7                       -> refused IdTaken
         account b basic                           -> refused IdTaken
         account b other 5 7                       -> refused IdTaken
         balance b                                 -> 5-0-0 7-0-0 in flight 0
         account c basic 9007199254740991 1        -> refused AmountOverflow
         key kc c                                  -> refused AccountNotFound
         account c basic 9007199254740991 0        -> done
         account c basic 9007199254740991 0        -> repeated
         grant b trial 3 later                     -> done
         account b basic 5 7                       -> repeated
         balance b                                 -> 8-0-0 7-0-0 in flight 0",
    );
}

#[test]
fn a_reservation_no_balance_can_hold_is_refused() {
    check("admit a r 1 k 4294967295 4294967295 -> refused InsufficientCredits 8589934590 200");
}

#[test]
fn a_charge_never_passes_its_reservation() {
    check(
        "admit a r 1 k 10 10          -> admitted #1 queued 20+0
         settle a r 1 10 0 11 stop    -> violated a charge passes its reservation
         settle a r 1 10 11 5 stop    -> violated a charge passes its reservation
         settle a r 1 10 0 10 length  -> #1 completed 20+0",
    );
}

#[test]
fn a_restart_releases_what_earlier_boots_left() {
    check(
        "admit a r 1 k 10 10 i      -> admitted #1 queued 20+0
         admit a s 2 k 10 10 j      -> admitted #1 queued 20+0
         start a s 2                -> #1 running 20+0
         admit a t 3 k 10 10 l      -> admitted #1 queued 20+0
         recover 10                 -> released 0
         boot boot2                 -> ok
         admit a u 4 k 10 10 m      -> admitted #1 queued 20+0
         recover 2                  -> released 2 of more
         recover 1                  -> released 1
         recover 2                  -> released 0
         balance a                  -> 100-0-20 100-0-0 in flight 1
         settle a s 2 10 0 1 stop   -> already #1 failed 0+0",
    );
}

#[test]
fn one_crash_counts_once_however_many_requests_ran_the_input() {
    check(
        "admit a r 1 k 1 1 same     -> admitted #1 queued 2+0
         start a r 1                -> #1 running 2+0
         admit a s 2 k 1 1 same     -> admitted #1 queued 2+0
         start a s 2                -> #1 running 2+0
         boot boot2                 -> ok
         recover 9                  -> released 2
         admit a r 3 k 1 1 same     -> admitted #2 queued 2+0",
    );
}

#[test]
fn an_input_that_was_running_in_two_crashes_is_refused_under_any_id() {
    check(
        "admit a r 1 k 1 1 bad      -> admitted #1 queued 2+0
         start a r 1                -> #1 running 2+0
         boot boot2                 -> ok
         recover 9                  -> released 1
         admit a s 2 k 1 1 bad      -> admitted #1 queued 2+0
         start a s 2                -> #1 running 2+0
         boot boot3                 -> ok
         recover 9                  -> released 1
         admit a r 3 k 1 1 bad      -> refused AttemptsExhausted
         admit a t 3 k 1 1 bad      -> refused AttemptsExhausted
         admit a t 3 k 1 1 good     -> admitted #1 queued 2+0",
    );
}

/// An input that was running in two crashes, the second at 1 000.
const CRASHED_TWICE: &str = "admit a r 1 k 1 1 bad      -> admitted #1 queued 2+0
     start a r 1                -> #1 running 2+0
     boot boot2                 -> ok
     recover 9                  -> released 1
     admit a s 2 k 1 1 bad      -> admitted #1 queued 2+0
     start a s 2                -> #1 running 2+0
     boot boot3                 -> ok
     recover 9                  -> released 1
     admit a t 3 k 1 1 bad      -> refused AttemptsExhausted
";

#[test]
fn crashes_count_for_a_bounded_time() {
    check(&format!(
        "{CRASHED_TWICE}
         at 1999                    -> ok
         admit a t 3 k 1 1 bad      -> refused AttemptsExhausted
         at 2000                    -> ok
         admit a t 3 k 1 1 bad      -> admitted #1 queued 2+0
         start a t 3                -> #1 running 2+0
         boot boot4                 -> ok
         recover 9                  -> released 1
         admit a u 4 k 1 1 bad      -> admitted #1 queued 2+0",
    ));
}

#[test]
fn a_completed_run_clears_the_crashes_of_its_input() {
    check(
        "admit a r 1 k 1 1 bad      -> admitted #1 queued 2+0
         start a r 1                -> #1 running 2+0
         boot boot2                 -> ok
         recover 9                  -> released 1
         admit a s 2 k 1 1 bad      -> admitted #1 queued 2+0
         settle a s 2 1 0 1 cancelled -> #1 cancelled 2+0
         admit a t 3 k 1 1 bad      -> admitted #1 queued 2+0
         settle a t 3 1 0 1 stop    -> #1 completed 2+0
         admit a u 4 k 1 1 bad      -> admitted #1 queued 2+0
         start a u 4                -> #1 running 2+0
         boot boot3                 -> ok
         recover 9                  -> released 1
         admit a v 5 k 1 1 bad      -> admitted #1 queued 2+0",
    );
}

#[test]
fn the_operator_clears_the_crashes_of_an_input() {
    check(&format!(
        "{CRASHED_TWICE}
         unblock a good             -> repeated
         unblock b bad              -> repeated
         admit a t 3 k 1 1 bad      -> refused AttemptsExhausted
         unblock a bad              -> done
         unblock a bad              -> repeated
         admit a t 3 k 1 1 bad      -> admitted #1 queued 2+0",
    ));
}

/// A day, milliseconds. The scripts below begin on 1970-01-01.
const MIDNIGHT: &str = "86400000";

#[test]
fn a_quota_counts_what_is_reserved_until_it_is_settled() {
    check(
        &"quotas 30 -                    -> ok
         admit a r 1 k 5 15             -> admitted #1 queued 20+0
         admit a s 2 k 5 15             -> refused LIMIT soon
         settle a r 1 5 5 6 stop        -> #1 completed 6+0
         admit a s 2 k 4 15             -> admitted #1 queued 19+0
         release a s 2 failed           -> #1 failed 0+0
         admit a s 3 k 4 16             -> refused plan_tokens day [30, 11, 0, 20] 86400000
         quotas 30 30                   -> ok
         admit a s 3 k 4 16             -> refused plan_tokens month [30, 11, 0, 20] 2678400000
         at 86399999                    -> ok
         admit a s 3 k 4 16             -> refused plan_tokens month [30, 11, 0, 20] 2678400000
         quotas 30 50                   -> ok
         at 86400000                    -> ok
         admit a s 3 k 4 16             -> admitted #2 queued 20+0
         quotas - -                     -> ok
         admit a t 4 k 9 9              -> admitted #1 queued 18+0"
            .replace("LIMIT", "plan_tokens day [30, 0, 20, 20]"),
    );
}

#[test]
fn budgets_of_account_and_key_both_hold() {
    check(
        "key l a                        -> done
         budget key k day 25            -> done
         budget account a month 40      -> done
         admit a r 1 k 10 10            -> admitted #1 queued 20+0
         admit a s 2 k 1 5              -> refused key_budget day [25, 0, 20, 6] soon
         admit a s 2 l 1 5              -> admitted #1 queued 6+0
         admit a t 3 l 10 5             -> refused account_budget month [40, 0, 26, 15] soon
         settle a r 1 10 0 10 stop      -> #1 completed 20+0
         admit a t 3 k 1 5              -> refused key_budget day [25, 20, 0, 6] 86400000
         settle a s 2 1 0 5 stop        -> #1 completed 6+0
         admit a t 3 l 10 5             -> refused account_budget month [40, 26, 0, 15] 2678400000
         admit a t 3 l 10 4             -> admitted #1 queued 14+0
         budget account a month none    -> done
         admit a u 4 l 10 5             -> admitted #1 queued 15+0
         budget key k day none          -> done
         admit a v 5 k 1 5              -> admitted #1 queued 6+0
         budget account a day 0         -> done
         admit a w 6 k 1 0              -> refused account_budget day [0, 26, 35, 1] 86400000
         budget account b day 5         -> refused AccountNotFound
         budget key m day 5             -> refused CredentialNotFound",
    );
}

/// A repeat of a request is answered although its budget is spent.
#[test]
fn a_spent_budget_stops_no_answer() {
    check(
        "budget account a day 20        -> done
         admit a r 1 k 10 10            -> admitted #1 queued 20+0
         admit a r 2 k 10 10            -> existing #1 queued 20+0
         settle a r 1 10 0 10 stop      -> #1 completed 20+0
         admit a r 3 k 10 10            -> existing #1 completed 20+0
         admit a s 4 k 10 10            -> refused account_budget day [20, 20, 0, 20] 86400000",
    );
}

#[test]
fn an_attempt_counts_in_the_period_of_its_admission() {
    check(
        &"budget account a day 20        -> done
         admit a r 1 k 10 10            -> admitted #1 queued 20+0
         at MIDNIGHT                    -> ok
         admit a s 2 k 5 5              -> admitted #1 queued 10+0
         settle a r 1 10 0 10 stop      -> #1 completed 20+0
         admit a t 3 k 5 5              -> admitted #1 queued 10+0
         admit a u 4 k 1 0              -> refused account_budget day [20, 0, 20, 1] soon
         release a s 2 failed           -> #1 failed 0+0
         admit a u 4 k 1 0              -> admitted #1 queued 1+0"
            .replace("MIDNIGHT", MIDNIGHT),
    );
}

#[test]
fn operators_are_told_once_in_each_period() {
    check(
        &"budget account a day 20 50     -> done
         budget key k month 100 20      -> done
         admit a r 1 k 5 4              -> admitted #1 queued 9+0
         settle a r 1 5 0 4 stop        -> #1 completed 9+0
         admit a s 2 k 1 9              -> admitted #1 queued 10+0
         settle a s 2 1 0 0 stop        -> #1 completed 1+0, account day
         admit a t 3 k 1 9              -> admitted #1 queued 10+0
         settle a t 3 1 0 5 cancelled   -> #1 cancelled 6+0
         at MIDNIGHT                    -> ok
         admit a u 4 k 5 5              -> admitted #1 queued 10+0
         settle a u 4 5 0 5 stop        -> #1 completed 10+0, account day, key month
         budget account a day none      -> done
         admit a v 5 k 5 5              -> admitted #1 queued 10+0
         settle a v 5 5 0 5 stop        -> #1 completed 10+0"
            .replace("MIDNIGHT", MIDNIGHT),
    );
}
