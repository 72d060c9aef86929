from ..values import UsageContext as UsageContext
